"""What the launcher says about exits, failures and restarts. Pure, but for the log that a failure quotes."""

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trivet.launcher.logs import last_lines
from trivet.wire.status import RestartRecord


def describe_exit(code: int | None) -> str:
    """`ended with exit code 3`, `killed by SIGKILL`; a shell's 128 + N is named too."""
    if code is None:
        return "still running"
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with exit code {code}"
    return f"killed by {name}" if code < 0 else f"ended with exit code {code} ({name})"


def quote_log(path: Path, *, offset: int) -> str:
    """The last lines of a log from `offset` on, and where the whole lies."""
    lines = last_lines(path, offset=offset)
    quoted = "\n".join(f"  | {line}" for line in lines) if lines else "  (it wrote nothing)"
    return f"last lines of {path}:\n{quoted}\nfull log: {path}"


def describe_restart(record: RestartRecord) -> str:
    """`trainer killed by SIGKILL: orchestrator and trainer restarted from step 6 (3 steps again), back after 14 s`."""
    did = f"{' and '.join(record.roles)} restarted"
    if record.from_step is not None:
        did += f" from {f'step {record.from_step}' if record.from_step else 'the start'}"
    if record.lost_steps:
        did += f" ({record.lost_steps} {'step' if record.lost_steps == 1 else 'steps'} again)"
    back = f"back after {record.down_s:.0f} s" if record.down_s is not None else "no progress since"
    return f"{record.cause}: {did}, {back}"


def recount(records: Sequence[RestartRecord]) -> Iterator[str]:
    """The restarts of a run in the order they happened, and what they cost; nothing when there were none."""
    if not records:
        return
    lost_s = sum(record.down_s or 0.0 for record in records)
    steps = sum(record.lost_steps for record in records)
    yield f"restarts: {len(records)}, {lost_s:.0f} s without progress, {steps} steps taken again"
    for record in records:
        yield f"  {time.strftime('%H:%M:%S', time.localtime(record.time))} {describe_restart(record)}"
