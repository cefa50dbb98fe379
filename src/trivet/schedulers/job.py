"""Becomes a command inside a job of a scheduler. A job that was queued again goes on with what it did before.

    python -m trivet.schedulers.job rl outputs/slurm/rl-1f0c.toml --pid-file outputs/slurm/17.pid

Such a job has the same script and the same configuration as at its first start, so what differs is decided here: by what the output
directory held before the job and holds now. A job that never came to begin its run starts as it would have the first time. Of the
nodes of a job the first decides; the others wait for what it writes beside the file of its process id.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import OWN_VARIABLES, RunLayout
from trivet.config.loading.dump import to_toml
from trivet.config.loading.load import load_config
from trivet.config.loading.sources import ENVIRONMENT_PREFIX
from trivet.config.sections.base import Section
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.sft import SftConfig
from trivet.config.sections.shared import CkptConfig
from trivet.config.sections.slurm import SlurmCommand
from trivet.exits import describe_exit
from trivet.process.lifetime import module_command, tied_command
from trivet.storage.durable import write_atomically, write_json_atomically

_POLL_INTERVAL_S = 0.5

COMMANDS: Mapping[SlurmCommand, tuple[str, type[Section]]] = {
    "rl": ("trivet.launcher.commands.rl", RLConfig),
    "sft": ("trivet.launcher.commands.sft", SftConfig),
    "eval": ("trivet.evaluation.main", EvalConfig),
}
"""Module and configuration of each command that can be a job."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the run in an output directory is."""

    run: str | None
    """The run's id and attempt; None before any."""
    commit: int | None
    """The newest committed step."""


def read_progress(layout: RunLayout) -> Progress:
    """Return how far the run in `layout` is."""
    run: str | None = None
    if layout.run_file.exists():
        record = msgspec.json.decode(layout.run_file.read_bytes(), type=dict[str, Any])
        run = f"{record.get('id')} attempt {record.get('attempt')}"
    return Progress(run=run, commit=max(committed_steps(layout), default=None))


def go_on(config: Section, *, before: Progress, now: Progress) -> Section:
    """Return the configuration with which a job that was queued again goes on.

    Args:
        before: what its first start found.
    """
    if isinstance(config, EvalConfig):
        has_results = config.output_dir is not None and RunLayout(config.output_dir).evals.exists()
        return config.model_copy(update={"resume_path": config.resume_path or (config.output_dir if has_results else None)})
    assert isinstance(config, RLConfig | SftConfig)
    if now.commit is not None and now.commit != before.commit:
        return _resume(config)
    if now.commit is None and now.run != before.run and isinstance(config, RLConfig):
        return config.model_copy(update={"clean": True})  # what the job's first start left is in the way
    return config


def _resume(config: RLConfig | SftConfig) -> Section:
    if isinstance(config, SftConfig):
        return config.model_copy(update={"ckpt": _resumed(config.ckpt)})
    roles = {
        name: role.model_copy(update={"ckpt": _resumed(role.ckpt)})
        for name, role in (("trainer", config.trainer), ("orchestrator", config.orchestrator))
    }
    return config.model_copy(update={"clean": False, "ckpt": _resumed(config.ckpt), **roles})


def _resumed(ckpt: CkptConfig) -> CkptConfig:
    """Return the keys that take up the job's own newest commit, whole: what a user leaves out is left out once."""
    whole = {name: False for name in CkptConfig.model_fields if name.startswith("skip_")}
    changes = {"allow_changes": ["*"]} if ckpt.resume_from is not None else {}
    return ckpt.model_copy(update={"resume_step": -1, "resume_from": None, **whole, **changes})


def decided_file(pid_file: Path, environ: Mapping[str, str]) -> Path:
    """Return the file of the configuration that this start of the job reads, on every node."""
    return pid_file.with_suffix(f".{environ.get('SLURM_RESTART_COUNT', '0')}.toml")


def decide(command: SlurmCommand, configuration: Path, *, pid_file: Path, decided: Path) -> None:
    """Write the configuration to start with; note what the directory holds at the job's first start."""
    config = load_config(COMMANDS[command][1], ["@", str(configuration)]).config
    output_dir = getattr(config, "output_dir", None)
    assert isinstance(output_dir, Path)
    now, note = read_progress(RunLayout(output_dir)), pid_file.with_suffix(".before.json")
    if not note.exists():
        write_json_atomically(note, now)
    else:
        config = go_on(config, before=msgspec.json.decode(note.read_bytes(), type=Progress), now=now)
    write_atomically(decided, to_toml(config).encode(), is_private=True)


def await_decision(decided: Path, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Return when the first node has written `decided`. The step of the job ends when that node does not come to it."""
    while not decided.exists():
        list(decided.parent.iterdir())  # NFS remembers for a while that a name was not there, unless its directory is read
        sleep(_POLL_INTERVAL_S)


def run_beside(command: Sequence[str]) -> None:
    """Run a command on a node that is not the first, whatever becomes of it: the job's exit code is that of the first node."""
    started = subprocess.Popen(tied_command(command))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: started.send_signal(number))
    code = started.wait()
    if code:
        print(f"this node {describe_exit(code)}; the first node decides what that means", file=sys.stderr)


def main() -> None:
    """Replace this process by the command, under the same process id; on other nodes than the first run it beside this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("configuration", type=Path)
    parser.add_argument("--pid-file", type=Path, required=True, help="where the command's process id is written")
    args = parser.parse_args()
    # The configuration is complete. A variable would set a key again, [slurm] among them: the job would submit itself.
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in OWN_VARIABLES]:
        del os.environ[name]
    decided = decided_file(args.pid_file, os.environ)
    command = module_command(COMMANDS[args.command][0], "@", str(decided))
    if os.environ.get("SLURM_PROCID", "0") != "0":
        await_decision(decided)
        run_beside(command)
        return
    decide(args.command, args.configuration, pid_file=args.pid_file, decided=decided)
    write_atomically(args.pid_file, f"{os.getpid()}\n".encode())
    sys.stdout.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
