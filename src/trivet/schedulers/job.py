"""Runs a command inside a job of a scheduler. A job that was started again goes on with what it did before.

    python -m trivet.schedulers.job rl outputs/slurm/rl-1f0c.toml --pid-file outputs/slurm/17.pid

Such a job has the same configuration as at its first start, so what differs is decided here: by what the output directory held
before the job and holds now. A job that never began its run starts as it would have the first time. Files beside that of the
process id hold what a later start must know: what the directory held, and an exit code that every further start would repeat.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from trivet.checkpoints.commit import committed_steps
from trivet.checkpoints.run_record import read_run
from trivet.config.dump import to_toml
from trivet.config.layout import COMMITTED, JOB_RETRIED, OWN_VARIABLES, RunLayout
from trivet.config.load import load_config
from trivet.config.schema.base import Section
from trivet.config.schema.deployment import SlurmCommand
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import CkptConfig
from trivet.config.sources import ENVIRONMENT_PREFIX
from trivet.errors import TrivetError
from trivet.exits import describe_exit
from trivet.process.lifetime import module_command, tied_command
from trivet.schedulers.preparation import FINAL_CODES
from trivet.shown_text import print_error
from trivet.storage.durable import hash_file, write_atomically, write_json_atomically

_BEFORE, _DECIDED, _FINAL = ".before.json", ".toml", ".final"
"""Endings of the files beside that of the process id: what the output directory held at the job's first start, the configuration
that this start of the job reads, and a final exit code."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

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
    digest: str = ""
    """The digest of its record: another run may have committed the same step."""


def read_progress(layout: RunLayout) -> Progress:
    """Return how far the run in `layout` is."""
    record, commit = read_run(layout), max(committed_steps(layout), default=None)
    digest = hash_file(layout.checkpoint_step(commit) / COMMITTED).xxh3_128 if commit is not None else ""
    run = f"{record.id} attempt {record.attempt}" if record is not None else None
    return Progress(run=run, commit=commit, digest=digest)


def is_complete(config: Section, *, before: Progress, now: Progress) -> bool:
    """Return whether an earlier start of the job has committed the last step of its run.

    Args:
        before: the progress that the job's first start found.
    """
    if not isinstance(config, RLConfig | SftConfig) or config.max_steps is None or not _has_own_commit(before=before, now=now):
        return False
    return now.commit is not None and now.commit >= config.max_steps


def _has_own_commit(*, before: Progress, now: Progress) -> bool:
    return now.commit is not None and (now.commit, now.digest) != (before.commit, before.digest)


def go_on(config: Section, *, before: Progress, now: Progress) -> Section:
    """Return the configuration with which a job that was started again goes on.

    Args:
        before: what its first start found.
    """
    if isinstance(config, EvalConfig):
        has_results = config.output_dir is not None and RunLayout(config.output_dir).evals.exists()
        return config.model_copy(update={"resume_path": config.resume_path or (config.output_dir if has_results else None)})
    assert isinstance(config, RLConfig | SftConfig)
    if _has_own_commit(before=before, now=now):
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


def decide(command: SlurmCommand, configuration: Path, *, pid_file: Path) -> Path | None:
    """Write the configuration to start with, and note what the directory holds at the job's first start.

    Returns:
        The file of the configuration. None when an earlier start of the job has completed the run.
    """
    config = load_config(COMMANDS[command][1], ["@", str(configuration)]).config
    output_dir = getattr(config, "output_dir", None)
    assert isinstance(output_dir, Path)
    now, note, decided = read_progress(RunLayout(output_dir)), pid_file.with_suffix(_BEFORE), pid_file.with_suffix(_DECIDED)
    if not note.exists():
        write_json_atomically(note, now)
    else:
        os.environ[JOB_RETRIED] = "1"
        before = msgspec.json.decode(note.read_bytes(), type=Progress)
        if is_complete(config, before=before, now=now):
            return None
        config = go_on(config, before=before, now=now)
    write_atomically(decided, to_toml(config).encode(), is_private=True)
    return decided


def run(command: SlurmCommand, configuration: Path, *, pid_file: Path) -> int:
    """Run a command as this start of its job; return the exit code as a shell counts it."""
    final = pid_file.with_suffix(_FINAL)
    if final.exists():  # KubeRay starts a job again after any exit code
        exit_code = int(final.read_text())
        print(
            f"an earlier start of this job {describe_exit(exit_code)}, which another start would repeat; to try again, write the"
            f" job anew, or remove {final}",
            file=sys.stderr,
        )
        return exit_code
    try:
        decided = decide(command, configuration, pid_file=pid_file)
        if decided is None:
            print("the run is complete: an earlier start of this job has committed its last step", file=sys.stderr)
            return 0
        exit_code = _run_child(module_command(COMMANDS[command][0], "@", str(decided)), pid_file=pid_file)
    except TrivetError as exc:
        print_error(exc)
        exit_code = exc.exit_code
    if exit_code in FINAL_CODES:
        write_atomically(final, f"{exit_code}\n".encode())
    return exit_code


def _run_child(command: Sequence[str], *, pid_file: Path) -> int:
    """Run a command that ends with this process, and gets the signals that ask this process to end."""
    child = subprocess.Popen(tied_command(command))
    for forwarded in _FORWARDED:
        signal.signal(forwarded, lambda number, _: child.send_signal(number))
    write_atomically(pid_file, f"{os.getpid()}\n".encode())
    try:
        ended = child.wait()
    finally:
        pid_file.unlink(missing_ok=True)
    return ended if ended >= 0 else 128 - ended


def main() -> int:
    """Run the command of this process's arguments to its end; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("configuration", type=Path)
    parser.add_argument(
        "--pid-file", type=Path, required=True, help="where the id of this process is written while the command runs"
    )
    args = parser.parse_args()
    # The configuration is complete. A variable would set a key again, [slurm] among them: the job would submit itself.
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in OWN_VARIABLES]:
        del os.environ[name]
    args.pid_file.parent.mkdir(parents=True, exist_ok=True)
    return run(args.command, args.configuration, pid_file=args.pid_file)


if __name__ == "__main__":
    raise SystemExit(main())
