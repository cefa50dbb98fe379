"""`trivet quickstart`: teaches a tiny model to reverse texts by reinforcement learning, in a few minutes and without a download.

It makes the start model and its data, runs `sft`, `rl` and `eval` with configs/quickstart/, and prints the results. Each command is
a child process that ends when this process ends. `bash scripts/quickstart.sh` installs the project and then runs this.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, count
from pathlib import Path
from statistics import mean

from trivet.cli.init import find_packaged
from trivet.config.layout import RunLayout
from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.inference import ServerConfig
from trivet.dependencies import require_dependencies
from trivet.environments.packages.interpreters import require_environment
from trivet.errors import ConfigError, RoleFailed
from trivet.process.lifetime import module_command, tied_command
from trivet.process.signals import Interrupts
from trivet.process.sockets import ReservedPorts
from trivet.telemetry.metrics import read_metrics
from trivet.weights.catalog import latest_version

CONFIGS = Path("configs/quickstart")
"""Configurations of the workspace, which the user may change. If they do not exist, the packaged ones are used."""

DEFAULT_OUTPUT = Path("outputs/quickstart")

_CHILD_VARIABLES = {
    "OMP_WAIT_POLICY": "passive",  # the roles share a few cores: a thread that waits must sleep, not spin
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
_NUM_ANSWERS = 3
"""Number of answers that the report shows of each model."""
_WINDOW = 5
"""Number of steps that are averaged at either end of the run, for the report."""
_POLL_INTERVAL_S = 0.2
_SERVER_STOP_TIMEOUT_S = 30.0
"""Time after which a server that was asked to end is killed. It usually takes a few seconds."""


class QuickstartLayout:
    """The paths in the output directory of a quickstart."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "sft.jsonl"
        """Warm-up conversations, JSONL."""
        self.start_model = root / "start"
        """The model with random weights."""
        self.warm_up = RunLayout(root / "sft")
        self.run = RunLayout(root / "run")
        """The reinforcement learning, after the supervised warm-up."""

    @property
    def has_results(self) -> bool:
        """True if a quickstart has written something here."""
        return any(path.exists() for path in (self.data, self.start_model, self.warm_up.root, self.run.root))


def configure_quickstart(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument("--seed", type=int, default=0, help="seed of the start model, the data and the training (default: 0)")
    parser.add_argument(
        "--output-dir", type=Path, help=f"a new directory (default: {DEFAULT_OUTPUT}, then {DEFAULT_OUTPUT}-2, …)"
    )


def run_quickstart(arguments: argparse.Namespace) -> int:
    """Run all phases. Return 0, or the exit code of the first process that failed."""
    require_environment(EnvConfig(id="reverse-text"))
    require_dependencies()
    layout, started = choose_layout(arguments.output_dir), time.monotonic()
    print(f"== output in {layout.root}")
    configs = CONFIGS if CONFIGS.is_dir() else find_packaged("configs") / "quickstart"
    with Interrupts(clock=time.monotonic) as interrupts:
        children = Children(environ=os.environ, interrupts=interrupts)
        seed = arguments.seed
        make_data = ("trivet.examples.quickstart_data", str(layout.data), "--seed", str(seed))
        make_model = ("trivet.examples.tiny_model", str(layout.start_model), "--seed", str(seed))
        layout.root.mkdir(parents=True, exist_ok=True)
        phases: dict[str, Callable[[], int]] = {
            "start model and warm-up data": lambda: children.run(*make_data) or children.run(*make_model),
            "supervised warm-up": lambda: children.run(*sft_command(layout, configs, seed=seed)),
            "reinforcement learning": lambda: children.run(*rl_command(layout, configs, seed=seed)),
            "measurement on held-out texts": lambda: children.evaluate(
                ["@", str(layout.run.configs / "inference.toml")],
                lambda port: eval_command(layout, configs, port=port),
                server_log=layout.run.logs / "measure.stdout",
            ),
        }
        for name, phase in phases.items():
            print(f"== {name}", flush=True)
            phase_started = time.monotonic()
            if (exit_code := phase()) != 0:
                print(f"error: {name} ended with exit code {exit_code}; see its output above", file=sys.stderr)
                return exit_code
            print(f"== {name} took {time.monotonic() - phase_started:.0f} s", flush=True)
    print(report(layout.root))
    print(f"== everything took {time.monotonic() - started:.0f} s")
    return 0


def choose_layout(output_dir: Path | None) -> QuickstartLayout:
    """Return the layout of `output_dir`. If it is None, use the first default name that has no earlier quickstart."""
    if output_dir is None:
        names = (DEFAULT_OUTPUT.with_name(f"{DEFAULT_OUTPUT.name}-{number}") for number in count(2))
        layouts = (QuickstartLayout(root) for root in chain([DEFAULT_OUTPUT], names))
        return next(layout for layout in layouts if not layout.has_results)
    layout = QuickstartLayout(output_dir)
    if layout.has_results:
        raise ConfigError(
            f"--output-dir {str(output_dir)!r} holds the results of an earlier quickstart; give another directory, "
            "leave --output-dir out to get a new one, or remove that directory first"
        )
    return layout


def sft_command(layout: QuickstartLayout, configs: Path, *, seed: int) -> Sequence[str]:
    """Return the module and the arguments for the supervised warm-up."""
    words = ["trivet.launcher.commands.sft", "@", configs / "sft.toml", "--seed", seed, "--output-dir", layout.warm_up.root]
    return [str(word) for word in [*words, "--model.name", layout.start_model, "--data.name", layout.data]]


def rl_command(layout: QuickstartLayout, configs: Path, *, seed: int) -> Sequence[str]:
    """Return the module and the arguments for the reinforcement learning, which starts from the last weights of the warm-up."""
    words = ["trivet.launcher.commands.rl", "@", configs / "rl.toml", "--seed", seed, "--output-dir", layout.run.root]
    return [str(word) for word in [*words, "--model.name", layout.warm_up.weights_step(_last_step(layout.warm_up))]]


def eval_command(layout: QuickstartLayout, configs: Path, *, port: int) -> Sequence[str]:
    """Return the module and the arguments for the measurement: the start model and the last policy."""
    words = ["trivet.evaluation.main", "@", configs / "eval.toml", "--client.base-url", f"http://127.0.0.1:{port}/v1"]
    return [str(word) for word in [*words, "--weights-dir", layout.run.weights, "--steps", _last_step(layout.run)]]


class Children:
    """Runs modules as child processes. Signals to this process are passed on to them."""

    def __init__(self, *, environ: Mapping[str, str], interrupts: Interrupts) -> None:
        # COLUMNS keeps tables from being cut if stdout is no terminal.
        self.environ, self._interrupts = {"COLUMNS": "120", **environ, **_CHILD_VARIABLES}, interrupts

    def start(self, module: str, *words: str, log: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start `python -m module words`, tied to this process; its output goes to the file `log` or to this terminal."""
        with log.open("wb") if log is not None else nullcontext() as stdout:
            return subprocess.Popen(
                tied_command(module_command(module, *words)),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT if stdout is not None else None,
                env=self.environ,
                start_new_session=True,
            )

    def run(self, module: str, *words: str, log: Path | None = None, watch: Callable[[], None] = lambda: None) -> int:
        """Start a module and wait for its end. Return its exit code as in a shell.

        Args:
            watch: called repeatedly while waiting. If it raises, the process is ended.
        """
        process, num_forwarded = self.start(module, *words, log=log), 0
        try:
            while process.poll() is None:
                num_forwarded = self._interrupts.forward(process.send_signal, num_forwarded)
                watch()
                time.sleep(_POLL_INTERVAL_S)
        finally:
            stop(process)
        code = process.returncode
        return code if code >= 0 else 128 - code

    def evaluate(
        self, server: Sequence[str], make_command: Callable[[int], Sequence[str]], *, server_log: Path, log: Path | None = None
    ) -> int:
        """Run an evaluation against a server of its own, which starts on a free port. Return the exit code as in a shell.

        Args:
            server: the arguments of the server.
            make_command: returns the module and the arguments of the evaluation for the server's port.
        """
        with ReservedPorts() as ports:
            port = ports.reserve("127.0.0.1", preferred=ServerConfig().port)
            process = self.start("trivet.inference.main", *server, "--server.port", str(port), log=server_log)

            def require_server() -> None:
                if process.poll() is not None:
                    raise RoleFailed(f"the inference server ended with exit code {process.returncode}; its log is {server_log}")

            try:
                return self.run(*make_command(port), log=log, watch=require_server)
            finally:
                stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process if it still runs: SIGTERM, then SIGKILL after a deadline."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_SERVER_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_step(layout: RunLayout) -> int:
    version = latest_version(layout)
    if version is None:
        raise ConfigError(f"{layout.weights} has no published weights: max_steps of its configuration must be >= 1")
    return version


def report(output: Path) -> str:
    """Return the report: rewards, scores and answers before and after the training, and the paths of the files.

    Args:
        output: the output directory of the quickstart, which holds `run/` and `sft/`.
    """
    run = output / "run"
    metrics = read_metrics(run / "metrics" / "orchestrator.jsonl")
    by_step = {line["step"]: line["reward/mean"] for line in metrics.rows if "reward/mean" in line}
    rewards = [by_step[step] for step in sorted(by_step)]
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in (run / "evals").glob("step_*/*/summary.json")]
    before, after = sorted(summaries, key=lambda summary: summary["step"])
    lines = [
        "",
        f"{'':34}{'before':>10}{'after':>10}",
        f"{f'reward, first and last {_WINDOW} steps':34}{mean(rewards[:_WINDOW]):10.3f}{mean(rewards[-_WINDOW:]):10.3f}",
        f"{'reward on held-out texts':34}{before['avg']:10.3f}{after['avg']:10.3f}",
        f"{'held-out texts reversed perfectly':34}{before['pass_at_k']:10.0%}{after['pass_at_k']:10.0%}",
        "",
    ]
    for label, step in (("start", 0), ("trained", after["step"])):
        lines.append(f"the {label} model answers:")
        [results] = (run / "evals").glob(f"step_{step}/*/results.jsonl")
        for line in results.read_text(encoding="utf-8").splitlines()[:_NUM_ANSWERS]:
            rollout = json.loads(line)
            text, answer = rollout["prompt"][-1]["content"], rollout["completion"][-1]["content"]
            lines.append(f"  {text:10} -> {answer:48} reward {rollout['reward']:.2f}")
    weights = run / "weights" / f"step_{after['step']}"
    paths = {
        "trained model": weights,
        "rewards and losses": run / "metrics",
        "what was sampled": run / "rollouts",
        "evaluations": run / "evals",
        "logs": run / "logs",
        "start model": output / "sft" / "weights",
    }
    lines += ["", *(f"{name:20} {path}" for name, path in paths.items())]
    if metrics.num_damaged:
        lines.append(f"{metrics.num_damaged} damaged lines of {run / 'metrics' / 'orchestrator.jsonl'} were skipped")
    return "\n".join(lines)
