"""Becomes a command inside a job of a scheduler. A job that was queued again goes on with what it did before.

    python -m trivet.schedulers.job rl outputs/slurm/rl-1f0c.toml --pid-file outputs/slurm/17.pid

Such a job has the same script and the same configuration as at its first start, so what differs is decided here: by what the output
directory held before the job and holds now. A job that never came to begin its run starts as it would have the first time. Of the
nodes of a job the first decides; the others wait for what it writes beside the file of its process id. At its end it writes its
exit code there too, which is the job's: schedulers know the codes of all nodes, and some report the highest one. Both files carry
an id of the start, because a scheduler may give two starts the same name.
"""

import argparse
import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from trivet.checkpoints.commit import committed_steps
from trivet.checkpoints.run_record import read_run
from trivet.config.dump import to_toml
from trivet.config.layout import COMMITTED, OWN_VARIABLES, RunLayout
from trivet.config.load import load_config
from trivet.config.schema.base import Section
from trivet.config.schema.deployment import SlurmCommand
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import CkptConfig
from trivet.config.sources import ENVIRONMENT_PREFIX
from trivet.errors import ConfigError, Diverged, NodesMissing, TrivetError
from trivet.exits import describe_exit
from trivet.process.lifetime import module_command, tied_command
from trivet.schedulers.lost_script import MAX_WATCHERS, LostScriptAction, replace_lost_script
from trivet.schedulers.node_variables import JOB_RETRIED, SLURM_INDEX, SLURM_JOB
from trivet.schedulers.starts import (
    END_TIMEOUT_S,
    POLL_INTERVAL_S,
    START_LINE,
    await_decision,
    code_file,
    decided_file,
    is_first_node,
    is_in_pod,
    note_end,
    read_end,
    read_start,
)
from trivet.shown_text import print_error
from trivet.storage.durable import hash_file, write_atomically, write_json_atomically

_BEFORE = ".before.json"
"""Ending of the note of what the output directory held at the job's first start."""
_END_POLL_INTERVAL_S = 5.0
"""Seconds between two checks for the first node's exit code. Hundreds of nodes list one directory for days."""
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
    """Return the configuration with which a job that was queued again goes on.

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


def decide(command: SlurmCommand, configuration: Path, *, pid_file: Path, decided: Path, start: str) -> Section | None:
    """Write the configuration to start with, and return it; note what the directory holds at the job's first start.

    Args:
        start: an id that no other start of the job has.

    Returns:
        None, and nothing is written, when an earlier start of the job has completed the run.
    """
    config = load_config(COMMANDS[command][1], ["@", str(configuration)]).config
    output_dir = getattr(config, "output_dir", None)
    assert isinstance(output_dir, Path)
    now, note = read_progress(RunLayout(output_dir)), pid_file.with_suffix(_BEFORE)
    if not note.exists():
        write_json_atomically(note, now)
    else:
        before = msgspec.json.decode(note.read_bytes(), type=Progress)
        if is_complete(config, before=before, now=now):
            return None
        config = go_on(config, before=before, now=now)
    write_atomically(decided, f"{START_LINE}{start}\n{to_toml(config)}".encode(), is_private=True)
    return config


def run_first(command: Sequence[str], *, code: Path, start: str) -> int:
    """Run a command on the first of several nodes; note its exit code, and return it as a shell counts it."""
    ended = _start_child(command, received=[]).wait()
    exit_code = ended if ended >= 0 else 128 - ended
    note_end(code, exit_code, start=start)
    return exit_code


def run_other(command: Sequence[str], *, decided: Path, code: Path, start: str, end_timeout_s: float = END_TIMEOUT_S) -> int:
    """Run a command on a node that is not the first. End it if the first node has ended and the command goes on.

    The first node refuses a command that has read the decision of an earlier start. Such a command is run again with the new
    decision.

    Args:
        decided: the configuration that the command reads, written by the start `start`.
        code: where the first node notes its exit code.
        end_timeout_s: how long the command may go on after that, and after each signal that it gets then. A node whose command was
            refused waits as long for a newer decision.

    Returns:
        The exit code of the command as `subprocess` counts it. It is not the job's.
    """
    received: list[int] = []
    while True:
        ended = _run_once(command, decided=decided, code=code, end_timeout_s=end_timeout_s, received=received)
        if not ended:
            return ended
        wait_s = end_timeout_s if ended == ConfigError.exit_code else 0.0
        newer = _await_newer_start(decided, code=code, start=start, timeout_s=wait_s, received=received)
        if newer is None:
            print(f"this node {describe_exit(ended)}; the first node decides what that means", file=sys.stderr)
            return ended
        start = newer


def _run_once(command: Sequence[str], *, decided: Path, code: Path, end_timeout_s: float, received: list[int]) -> int:
    """Run a command once, and return its exit code as `subprocess` counts it."""
    child, patient_until = _start_child(command, received=received), math.inf
    signals = iter((signal.SIGTERM, signal.SIGKILL))
    while (ended := child.poll()) is None:
        if patient_until == math.inf and read_end(code, decided=decided) is not None:
            patient_until = time.monotonic() + end_timeout_s
        if time.monotonic() > patient_until:
            child.send_signal(next(signals, signal.SIGKILL))
            patient_until = time.monotonic() + end_timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, min(_END_POLL_INTERVAL_S, patient_until - time.monotonic())))
    return ended


def _await_newer_start(decided: Path, *, code: Path, start: str, timeout_s: float, received: Sequence[int]) -> str | None:
    """Return the id of a start that decided after `start`; None when there is none in time, or this node is asked to end."""
    deadline = time.monotonic() + timeout_s
    while not received:
        found, ended = read_start(decided), read_end(code, decided=decided)
        if found not in (None, start) and ended is None:
            return found
        if ended is not None or time.monotonic() >= deadline:
            return None
        time.sleep(POLL_INTERVAL_S)
    return None


def _start_child(command: Sequence[str], *, received: list[int]) -> "subprocess.Popen[bytes]":
    """Start a command that ends with this process, and gets the signals that ask this process to end.

    Args:
        received: gets the numbers of these signals.
    """
    child = subprocess.Popen(tied_command(command))

    def forward(number: int, _: object) -> None:
        received.append(number)
        child.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    return child


def main() -> None:
    """Replace this process by the command, under the same process id. On several nodes without pods it is a child of this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("configuration", type=Path)
    parser.add_argument("--pid-file", type=Path, required=True, help="where the command's process id is written")
    parser.add_argument("--script-host", help="SLURM's name of the node that runs the batch script, when the job may lose it")
    parser.add_argument(
        "--script-lost", choices=get_args(LostScriptAction), default="cancel", help="what to do with the job then"
    )
    parser.add_argument(
        "--heed-final-code",
        action="store_true",
        help="end with the exit code 2 or 3 of an earlier start: KubeRay retries after any",
    )
    args = parser.parse_args()
    # The configuration is complete. A variable would set a key again, [slurm] among them: the job would submit itself.
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in OWN_VARIABLES]:
        del os.environ[name]
    args.pid_file.parent.mkdir(parents=True, exist_ok=True)
    is_first, is_pod = is_first_node(os.environ), is_in_pod(os.environ)
    start = secrets.token_hex(8)
    try:
        if is_first:
            _run_first_node(args, start=start)
        else:
            _run_other_node(args)
    except TrivetError as exc:
        print_error(exc)
        if is_first:
            note_end(code_file(args.pid_file, os.environ), exc.exit_code, start=start)
        raise SystemExit(exc.exit_code if is_first or is_pod else 0) from exc


def _run_first_node(args: argparse.Namespace, *, start: str) -> None:
    decided, code = decided_file(args.pid_file, os.environ), code_file(args.pid_file, os.environ)
    if args.heed_final_code and (final := read_end(code, decided=decided)) in (ConfigError.exit_code, Diverged.exit_code):
        print(
            f"an earlier start of this job {describe_exit(final)}, which another start would repeat; to try again, write the"
            f" manifest anew, or remove {code}",
            file=sys.stderr,
        )
        raise SystemExit(final)
    if args.pid_file.with_suffix(_BEFORE).exists():
        os.environ[JOB_RETRIED] = "1"
    for path in (code, decided):  # of an earlier start with the same name; its code alone would say that this start has ended
        path.unlink(missing_ok=True)
    config = decide(args.command, args.configuration, pid_file=args.pid_file, decided=decided, start=start)
    if config is None:
        print("the run is complete: an earlier start of this job has committed its last step", file=sys.stderr)
        note_end(code, 0, start=start)
        return
    write_atomically(args.pid_file, f"{os.getpid()}\n".encode())
    if is_in_pod(os.environ) or not (isinstance(config, RLConfig) and config.deployment.num_nodes > 1):
        _become(_command(args, decided))  # a pod's exit code is its own, and the JobSet acts on that of the first
    else:
        raise SystemExit(run_first(_command(args, decided), code=code, start=start))


def _run_other_node(args: argparse.Namespace) -> None:
    decided, code = decided_file(args.pid_file, os.environ), code_file(args.pid_file, os.environ)
    found = await_decision(decided, code=code)
    if found is None:
        return
    if is_in_pod(os.environ):
        _become(_command(args, decided))
        return
    ended = run_other(_command(args, decided), decided=decided, code=code, start=found)
    if args.script_host and ended == NodesMissing.exit_code and int(os.environ[SLURM_INDEX]) <= MAX_WATCHERS:
        for number in _FORWARDED:  # from here on they end this process
            signal.signal(number, signal.SIG_DFL)
        replace_lost_script(
            os.environ[SLURM_JOB],
            host=args.script_host,
            action=args.script_lost,
            is_over=lambda: read_end(code, decided=decided) is not None,
        )


def _command(args: argparse.Namespace, decided: Path) -> list[str]:
    return module_command(COMMANDS[args.command][0], "@", str(decided))


def _become(command: list[str]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
