"""Sums up the restarts of a run for its last lines."""

import time
from collections.abc import Iterator, Sequence

from trivet.exits import describe_restart
from trivet.wire.status import RestartRecord


def recount(records: Sequence[RestartRecord]) -> Iterator[str]:
    """The restarts of a run in the order they happened, and what they cost; nothing when there were none."""
    if not records:
        return
    lost_s = sum(record.down_s or 0.0 for record in records)
    steps = sum(record.lost_steps for record in records)
    yield f"restarts: {len(records)}, {lost_s:.0f} s without progress, {steps} steps taken again"
    for record in records:
        yield f"  {time.strftime('%H:%M:%S', time.localtime(record.time))} {describe_restart(record)}"
