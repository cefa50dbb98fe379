"""Runs the launcher `rl` on several nodes, as a scheduler does: the same command on each of them."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.cluster_run import DEPLOYMENT, ENVIRON, START_S
from support.nodes import Nodes
from support.processes import wait_until
from support.rl_run import CONFIG
from trivet.config.layout import RunLayout
from trivet.process.lifetime import module_command


class NodeRun:
    """One run whose command is started on each of its nodes."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        nodes: Nodes,
        *,
        max_steps: int,
        num_train_nodes: int,
        num_servers: int,
        nodes_per_server: int = 1,
    ) -> None:
        self.layout = RunLayout(directory / "outputs")
        self.nodes = nodes
        self.count = num_train_nodes + num_servers * nodes_per_server
        self._config = directory / "rl.toml"
        text = CONFIG.format(max_steps=max_steps, output_dir=self.layout.root, model=model)
        deployment = DEPLOYMENT.format(
            num_train_nodes=num_train_nodes, num_servers=num_servers, nodes_per_server=nodes_per_server
        )
        self._config.write_text(text + deployment)
        self._directory = directory

    def start(
        self, node: int, *flags: str, at: int | None = None, environ: Mapping[str, str] = ENVIRON, through: Sequence[str] = ()
    ) -> "subprocess.Popen[bytes]":
        """Start the command of a node.

        Args:
            at: where it runs, if not on the node itself.
            through: words before the command.
        """
        command = module_command(
            "trivet.launcher.commands.rl", "@", str(self._config), "--deployment.node-rank", str(node), *flags
        )
        place = node if at is None else at
        return self.nodes.start(place, [*through, *command], log=self._directory / f"node_{node}.out", environ=environ)

    def output(self, node: int = 0) -> str:
        return (self._directory / f"node_{node}.out").read_text()

    def everything(self) -> str:
        logs = [self._directory / f"node_{node}.out" for node in range(self.count)]
        logs += sorted(self.layout.logs.rglob("*.stdout"))
        return "\n\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def await_step(self, step: int) -> None:
        self.await_that(lambda: self.layout.weights_step(step).exists() or self.has_passed(step), f"step {step}")

    def has_passed(self, step: int) -> bool:
        return f"trainer SUCCESS Step {step} " in self.output()

    def await_said(self, words: str) -> None:
        self.await_that(lambda: words in self.output(), words)

    def await_that(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(condition, timeout_s=START_S, waiting_for=what)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {self.everything()}") from None
