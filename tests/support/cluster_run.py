"""Runs `rl` on a Ray cluster: the driver on machine 0, the nodes of the run on the others."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from support.processes import wait_until
from support.ray_nodes import RayNodes
from support.rl_run import CONFIG, ENVIRONMENTS
from trivet.config.layout import RunLayout
from trivet.process.lifetime import module_command

DEPLOYMENT = """
[deployment]
type = "multi_node"
num_train_nodes = {num_train_nodes}
num_infer_nodes = {nodes_per_server}
num_infer_replicas = {num_servers}
gpus_per_node = 0
start_timeout_s = 90
lost_after_s = 10

[recovery]
max_restarts = 10

[inference.parallel]
tp = {nodes_per_server}
"""
START_S = 300.0
ENVIRON = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "WANDB_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
}
MODULES = {
    "trainer": "trivet.trainer.main",
    "orchestrator": "trivet.orchestrator.main",
    "inference": "trivet.inference.main",
    "env-workers": "trivet.orchestrator.environment_node",
}


class ClusterRun:
    """One run on a Ray cluster, whose machines have one CPU each."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        nodes: RayNodes,
        *,
        max_steps: int,
        num_train_nodes: int = 1,
        num_servers: int = 1,
        nodes_per_server: int = 1,
        keys: str = "",
    ) -> None:
        self.layout = RunLayout(directory / "outputs")
        self.nodes = nodes
        self._config = directory / "rl.toml"
        self._log = directory / "driver.out"
        self._directory = directory
        text = CONFIG.format(max_steps=max_steps, output_dir="outputs", model=model)
        deployment = DEPLOYMENT.format(
            num_train_nodes=num_train_nodes, num_servers=num_servers, nodes_per_server=nodes_per_server
        )
        self._config.write_text(text + deployment.replace("[deployment]\n", f"[deployment]\n{keys}"))

    def add_keys(self, text: str) -> None:
        """Add tables to the configuration."""
        self._config.write_text(self._config.read_text() + text)

    def start_ray(self, *machines: int, environ: Mapping[str, str] = {}) -> None:
        """Start the cluster on machine 0, and have others join it.

        Args:
            environ: further variables of the other machines.
        """
        self.nodes.start_head(environ=ENVIRON)
        for machine in machines:
            self.join(machine, environ=environ)

    def join(self, machine: int, *, environ: Mapping[str, str] = {}) -> None:
        """Have a machine join the cluster. Its roles inherit the environment of Ray."""
        self.nodes.join(machine, environ={**ENVIRON, **environ})

    def start(self, *flags: str, machine: int = 0, environ: Mapping[str, str] = ENVIRON) -> "subprocess.Popen[bytes]":
        """Start the driver in the directory of the run: the paths in its configuration are relative to it."""
        command = module_command("trivet.launcher.commands.rl", "@", str(self._config), *flags)
        command = ["env", f"--chdir={self._directory}", *command]
        return self.nodes.start(machine, command, log=self._log, environ=self.nodes.environ(environ))

    def output(self) -> str:
        return self._log.read_text()

    def everything(self) -> str:
        logs = [self._log, *self._directory.glob("ray_*.out"), *sorted(self.layout.logs.rglob("*.stdout"))]
        logs += sorted(self.layout.logs.rglob("node_*.log"))
        return "\n\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def machine_of(self, role: str) -> int:
        """Return the machine that runs a role."""
        return self.machines_of(role)[0]

    def machines_of(self, role: str) -> list[int]:
        """Return the machines on which processes of a role run."""
        found: list[int] = []
        for machine in range(1, self.nodes.count):
            for pid in self.nodes.pids(machine):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if MODULES[role].encode() in words and machine not in found:
                    found.append(machine)
        return found

    def await_step(self, step: int) -> None:
        self.await_that(lambda: f"trainer SUCCESS Step {step} " in self.output(), f"step {step}")

    def await_said(self, words: str) -> None:
        self.await_that(lambda: words in self.output(), words)

    def await_that(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(condition, timeout_s=START_S, waiting_for=what)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {self.everything()}") from None


def prove(layout: RunLayout) -> None:
    """Prove the run's history with `trivet check`."""
    command = module_command("trivet.cli.main", "check", str(layout.root), python=sys.executable)
    checked = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
