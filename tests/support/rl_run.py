"""Runs the launcher `rl` as a user does: real roles, the real vLLM, a tiny model and an environment that it can learn."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from support.processes import descendants_with, heed_signals, wait_until
from trivet.config.layout import RunLayout
from trivet.launcher.supervision.observer import describe
from trivet.process.lifetime import descendants
from trivet.process.signals import STACKS_SIGNAL
from trivet.telemetry.process_report import read_report

_STACKS_WITHIN_S = 2.0
ENVIRONMENTS = Path(__file__).parent / "environments"

CONFIG = """
max_steps = {max_steps}
seq_len = 256
max_model_len = 256
output_dir = "{output_dir}"

[model]
name = "{model}"

[ckpt]
interval = 6

[trainer.model]
compute_dtype = "float32"

[trainer.optim]
lr = 1e-2

[orchestrator]
batch_size = 16
rollouts_per_example = 4
oversampling_factor = 2.0

[orchestrator.sampling]
max_tokens = 12

[[orchestrator.env]]
id = "vowels"

[inference]
max_num_seqs = 32
cpu_kv_cache_gib = 0.25

[inference.model]
dtype = "float32"
enforce_eager = true
"""


class Run:
    """A run of `rl`, started as a user would."""

    def __init__(self, directory: Path, model: Path, *, max_steps: int = 12, template: str = CONFIG) -> None:
        directory.mkdir(exist_ok=True)
        self.layout = RunLayout(directory / "outputs")
        self._config = directory / "rl.toml"
        self._config.write_text(template.format(max_steps=max_steps, output_dir=self.layout.root, model=model))
        self._log = directory / "rl.out"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, *flags: str, environment: Mapping[str, str] = os.environ, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start the launcher. `prefix` is a command that runs the one that follows it, for example in a namespace."""
        environment = dict(environment) | {"PYTHONPATH": str(ENVIRONMENTS), "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
        with self._log.open("ab") as log:
            command = [*prefix, sys.executable, "-m", "trivet.launcher.commands.rl", "@", str(self._config), *flags]
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=heed_signals,
                umask=0o022,
            )
        return self.process

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, path: Path, *, timeout_s: float = 900.0) -> None:
        """Wait until `path` exists. Fail with the run's output when the run ends first."""
        process = self.process
        assert process is not None
        wait_until(
            lambda: path.exists() or process.poll() is not None,
            timeout_s=timeout_s,
            waiting_for=f"{path}: {self.output[-4000:]}",
        )
        assert process.poll() is None, self.output[-4000:]

    def await_exit(self, timeout_s: float = 1200.0) -> int:
        """Return the launcher's exit code. After a timeout, fail with the stacks of each process of the run."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s:g} s: {self.output[-4000:]}{self._where_it_is()}") from None

    def _where_it_is(self) -> str:
        reports = [report for path in self.layout.reports.glob("*.json") if (report := read_report(path)) is not None]
        pids = {pid for report in reports for pid in (report.pid, *(worker.pid for worker in report.workers))}
        for pid in pids.intersection(descendants(os.getpid())):
            os.kill(pid, STACKS_SIGNAL)
        time.sleep(_STACKS_WITHIN_S)
        logs = [*self.layout.logs.rglob("*.stdout"), *self.layout.logs.rglob("*.log")]
        tails = [f"{log.relative_to(self.layout.logs)}:\n{log.read_text(errors='replace')[-8000:]}" for log in sorted(logs)]
        return "\n\n".join(["", describe(reports), *tails])

    def role(self, name: str) -> psutil.Process:
        """Return the process that the launcher started for a role."""
        assert self.process is not None
        modules = {"inference": "trivet.inference.main", "orchestrator": "trivet.orchestrator.main", "origin": "trivet.origin"}
        module = modules.get(name, "trivet.trainer.ranks.starter")
        found = descendants_with(module, self.process.pid)
        assert found, f"no process of {name}: {self.output[-4000:]}"
        return found[0]

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(120)
