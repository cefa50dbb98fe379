"""`uv run rl --bench`: the trainer of a run by itself, measured on the devices that the run gives it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trivet.config.dump import to_toml
from trivet.config.schema.rl import RLConfig
from trivet.launcher.gpu_shares import share_gpus
from trivet.launcher.plan import trainer_process
from trivet.machine import inspect_machine
from trivet.storage.durable import write_private


def measure_trainer(config: RLConfig) -> int:
    """Run the trainer's ranks under `trainer.bench` to their end; returns their exit code."""
    machine = inspect_machine()
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        file = Path(scratch) / "trainer.toml"
        write_private(file, to_toml(config.trainer))
        spec = trainer_process(config, sys.executable, file, share_gpus(config, machine.gpus), machine)
        return subprocess.run(spec.argv, env={**spec.env_defaults, **os.environ, **spec.env}, check=False).returncode
