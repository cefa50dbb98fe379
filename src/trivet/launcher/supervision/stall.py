"""Notices a run in which nothing moves any more, although every process reports. Pure.

A role that waits reports that it waits and is not stuck by itself. When nothing changes that the roles report, they wait for each
other, or for something that none of them sees.
"""

from collections.abc import Iterable, Iterator

from trivet.wire.status import ProcessReport, WorkerStatus

_MAX_CHECK_GAP_S = 5.0
"""Checks further apart than this say that the launcher itself was stopped: nothing could move meanwhile."""

Situation = tuple[object, ...]


class StallWatch:
    """Measures for how long nothing that the roles report has changed.

    >>> watch = StallWatch(after_s=600.0)
    >>> watch.check(situation_of(reports), now=clock())
    """

    def __init__(self, *, after_s: float) -> None:
        self._after_s = after_s
        self._situation: Situation | None = None
        self._since = 0.0
        self._checked_at = 0.0
        self._next_s = after_s
        self.is_first = False
        """True when the last check that named a stall was the first to name this one."""

    def check(self, situation: Situation, *, now: float) -> float | None:
        """Return the seconds since which nothing moved: once they are `after_s`, and again after twice the time; else None."""
        if situation != self._situation:
            self._situation, self._since, self._next_s = situation, now, self._after_s
        elif (away_s := now - self._checked_at) > _MAX_CHECK_GAP_S:
            self._since += away_s
        self._checked_at = now
        if (still_s := now - self._since) < self._next_s:
            return None
        self.is_first = self._next_s == self._after_s
        self._next_s *= 2
        return still_s


def situation_of(reports: Iterable[ProcessReport]) -> Situation:
    """Return what changes when a run moves: anything that its processes say but the time."""
    return tuple(
        (
            *(report.role, report.rank, report.attempt, report.activity, report.waits_for, report.since),
            *(report.step, report.policy_version, report.num_ready, report.num_in_flight),
            *(_progress_of(worker) for worker in report.workers),
        )
        for report in reports
    )


def _progress_of(worker: WorkerStatus) -> Situation:
    return worker.env, worker.pid, worker.num_pending, worker.num_generating, worker.num_scoring


def pids_of(reports: Iterable[ProcessReport]) -> Iterator[int]:
    """Yield the pids of the processes that report, and of their environment workers."""
    for report in reports:
        yield report.pid
        yield from (worker.pid for worker in report.workers)


def describe(reports: Iterable[ProcessReport]) -> str:
    """Say who does what, or waits for what from whom, for the line that names a stall."""
    return "; ".join(clause for report in reports for clause in _clauses(report))


def _clauses(report: ProcessReport) -> Iterator[str]:
    name = report.role if report.num_ranks == 1 else f"{report.role} rank {report.rank}"
    doing = f"waits for {report.activity} (from {report.waits_for})" if report.waits_for else report.activity
    if report.num_in_flight is not None:
        doing += f" with {report.num_in_flight} groups in flight, {report.num_ready or 0} ready"
    yield f"{name}: {doing}"
    for worker in report.workers:
        if worker.num_pending:
            at = f"{worker.num_generating} rollouts generating, {worker.num_scoring} scoring"
            yield f"environment {worker.env}: {worker.num_pending} groups pending, {at}"
