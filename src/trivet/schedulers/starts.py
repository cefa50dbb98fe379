"""Names, reads and writes the files by which the nodes of a job agree on one start of it: what the first decided, and how it ended.

Both files carry an id of the start, because a scheduler may give two starts the same name. `schedulers.job` writes them on the
first node and reads them on the others. Nothing here starts a process.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trivet.errors import NodesMissing
from trivet.schedulers.node_variables import (
    JOB_INDEX,
    NODE_BASE,
    POD_INDEX,
    RESTARTS,
    SKYPILOT_HOSTS,
    SKYPILOT_INDEX,
    SLURM_INDEX,
    SLURM_RESTARTS,
)
from trivet.storage.durable import hash_bytes, write_atomically

POLL_INTERVAL_S = 0.5
"""Seconds between two checks for the first node's decision, which comes within seconds."""
_DECISION_TIMEOUT_S = 300.0
"""A node imports for seconds before it decides, and a file on NFS is seen up to a minute late."""
END_TIMEOUT_S = 60.0
"""How long a node may go on after the first one has ended, which has told it to end if it ever led the run."""
START_LINE = "# start "
"""The first line of a decided file begins with this, before the id of its start. To TOML it is a comment."""


def decided_file(pid_file: Path, environ: Mapping[str, str]) -> Path:
    """Return the file of the configuration that this start of the job reads, on every node."""
    return pid_file.with_suffix(f".{_name_start(environ)}.toml")


def code_file(pid_file: Path, environ: Mapping[str, str]) -> Path:
    """Return the file in which the first of several nodes notes its exit code; `schedulers.slurm` knows this name."""
    return pid_file.with_suffix(f".{_name_start(environ)}.code")


def _name_start(environ: Mapping[str, str]) -> str:
    """Return what tells this start of the job from its others, the same on every node."""
    if is_in_pod(environ):
        return environ[RESTARTS]
    if SKYPILOT_INDEX in environ:
        # SkyPilot does not count starts. Other machines may have the same addresses, and number their jobs from 1 again.
        machines = hash_bytes(environ.get(SKYPILOT_HOSTS, "").encode()).xxh3_128
        return f"{environ.get('SKYPILOT_INTERNAL_JOB_ID', '0')}-{machines[:8]}"
    return environ.get(SLURM_RESTARTS, "0")


def is_in_pod(environ: Mapping[str, str]) -> bool:
    """Return whether this node is a pod, of which Kubernetes sees the exit code."""
    return NODE_BASE in environ


def is_first_node(environ: Mapping[str, str]) -> bool:
    """Return whether this is the node of the job that decides how it starts."""
    if is_in_pod(environ):
        return all(environ[name] == "0" for name in (NODE_BASE, JOB_INDEX, POD_INDEX))
    return environ.get(SKYPILOT_INDEX, environ.get(SLURM_INDEX, "0")) == "0"


def await_decision(
    decided: Path, *, code: Path, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """Wait for the first node to write `decided`; return the id of its start, or None when the run is complete already.

    A start that has ended already may be an earlier one of the same name. So this node waits a while for the next.

    Args:
        code: where the first node notes its exit code.

    Raises:
        NodesMissing: the first node ended before, or wrote nothing within `_DECISION_TIMEOUT_S`: it may not share the directory.
    """
    since = clock()
    while True:
        start, ended = read_start(decided), read_end(code, decided=decided)
        if start is not None and ended is None:
            return start
        if start is None and ended == 0:
            return None
        if start is None and ended is not None:
            raise NodesMissing("the first node ended before it decided how the job starts: see its lines in the log of the job")
        if ended is not None and clock() >= since + END_TIMEOUT_S:
            raise NodesMissing("the first node ended before this one began: see its lines in the log of the job")
        if clock() >= since + _DECISION_TIMEOUT_S:
            raise NodesMissing(
                f"the first node of the job did not write {decided} within {_DECISION_TIMEOUT_S:g} s: see its lines in the log of"
                " the job, and whether all nodes share output_dir"
            )
        sleep(POLL_INTERVAL_S)


def read_start(decided: Path) -> str | None:
    """Return the id of the start that wrote `decided`; None while this node does not see the file."""
    text = _read(decided)
    return text.partition("\n")[0].removeprefix(START_LINE) if text is not None else None


def read_end(code: Path, *, decided: Path) -> int | None:
    """Return the exit code of the first node; None while the start that wrote `decided` has not ended there."""
    exit_code, _, of_start = (_read(code) or "").strip().partition(" ")
    return int(exit_code) if exit_code and read_start(decided) in (None, of_start) else None


def note_end(code: Path, exit_code: int, *, start: str) -> None:
    """Write the exit code of the first node for the others and for the batch script, which reads the first word."""
    try:
        write_atomically(code, f"{exit_code} {start}\n".encode())
    except OSError as exc:  # the job still ends with this code, unless the scheduler kills another node
        print(f"exit code {exit_code} was not noted in {code}: {exc.strerror}; see why that cannot be written", file=sys.stderr)


def _read(path: Path) -> str | None:
    """Return the text of a file; None while this node does not see it. NFS may fail to read a directory for a moment."""
    try:
        list(path.parent.iterdir())  # NFS remembers for a while that a name was not there, unless its directory is read
        return path.read_text()
    except OSError:
        return None
