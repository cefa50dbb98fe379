"""Becomes a command inside a job of a scheduler: new at the job's first start, going on after each further one.

    python -m trivet.schedulers.job rl outputs/slurm/rl.toml --pid-file outputs/slurm/17.pid

A job that was queued again has the same script and the same configuration, so what differs is decided here, by what the run has
committed.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.config.loading.load import load_config
from trivet.config.sections.base import Section
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.sft import SftConfig
from trivet.process.lifetime import module_command
from trivet.storage.durable import write_atomically

COMMANDS: Mapping[str, tuple[str, type[Section]]] = {
    "rl": ("trivet.launcher.commands.rl", RLConfig),
    "sft": ("trivet.launcher.commands.sft", SftConfig),
    "eval": ("trivet.evaluation.main", EvalConfig),
}
"""Module and configuration of each command that can be a job."""


def count_restarts(environ: Mapping[str, str]) -> int:
    """Return how often the scheduler has started this job again."""
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def flags_after_restart(config: Section) -> list[str]:
    """Return the flags with which a command goes on with what its job has done before."""
    if isinstance(config, EvalConfig):
        return ["--resume-path", str(config.output_dir)]
    assert isinstance(config, RLConfig | SftConfig)
    roles = ("", "trainer.", "orchestrator.") if isinstance(config, RLConfig) else ("",)
    if committed_steps(RunLayout(config.output_dir)):
        going_on = [f"--{role}ckpt.{flag}" for role in roles for flag in ("resume-step=-1", "resume-from=None")]
        return [*going_on, "--no-clean"] if isinstance(config, RLConfig) else going_on
    # Nothing to go on from: what the job's first start left is in the way.
    return ["--clean"] if isinstance(config, RLConfig) else []


def main() -> None:
    """Replace this process by the command, under the same process id."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("configuration", type=Path)
    parser.add_argument("--pid-file", type=Path, required=True, help="where the command's process id is written")
    args = parser.parse_args()
    module, kind = COMMANDS[args.command]
    given = ["@", str(args.configuration)]
    flags = flags_after_restart(load_config(kind, given).config) if count_restarts(os.environ) else []
    write_atomically(args.pid_file, f"{os.getpid()}\n".encode())
    sys.stdout.flush()
    os.execv(sys.executable, module_command(module, *given, *flags))


if __name__ == "__main__":
    main()
