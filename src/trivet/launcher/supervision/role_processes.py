"""Follows one started role: its exit, its log, and what its processes report."""

import re
from collections.abc import Callable, Sequence

from trivet.launcher.host import HostedProcess
from trivet.launcher.logs import LogFollower, last_lines
from trivet.launcher.plan import ORCHESTRATOR
from trivet.launcher.reports import RoleReports
from trivet.launcher.supervision.decisions import RoleObservation
from trivet.launcher.supervision.watchdog import Watchdog

_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
_NUMBER = re.compile(r"\d+")


class RoleProcess:
    """One started role.

    >>> role = RoleProcess(host.start(spec), now=clock.now())
    >>> lines = role.poll(now=clock.now(), is_complete=has_completed)
    >>> role.observe(has_progressed=False).exit_code is None
    True
    """

    def __init__(self, child: HostedProcess, *, now: float) -> None:
        self.child = child
        self.started_at = now
        self.reports = RoleReports()
        """What its processes reported when the host was asked last."""
        self.stuck = ""
        """The reason why the watchdog treats it as stuck; empty when it does not."""
        self.stopped: tuple[int, ...] = ()
        """Pids of those of its processes that a signal has stopped."""
        self._follower = LogFollower(child.spec.log, offset=child.log_offset)
        self._exit_code: int | None = None
        self._ended_at = 0.0
        self._is_complete = False
        self._last_output_at = now
        self._last_log_line = ""

    @property
    def name(self) -> str:
        """Name of the role."""
        return self.child.spec.name

    @property
    def is_running(self) -> bool:
        """True when it ran at the last poll."""
        return self._exit_code is None

    def poll(self, *, now: float, is_complete: Callable[[str], bool]) -> list[str]:
        """Notice new output and the exit; returns the lines that were added to the log.

        Args:
            is_complete: whether the role of that name recorded that it reached the last step.
        """
        code = self.child.exit_code
        lines = self._follower.read_lines()
        if lines:
            self._last_output_at = now
        if self._exit_code is None and code is not None:
            self._exit_code, self._ended_at, self.stuck = code, now, ""
            self._is_complete = code == 0 and (not self.child.spec.records_end or is_complete(self.name))
            self._last_log_line = _normalize(last_lines(self.child.spec.log, offset=self.child.log_offset, count=1))
        return lines

    def watch(self, watchdog: Watchdog, *, now: float) -> None:
        """Update `stuck`."""
        if self._exit_code is None:
            self.stuck = watchdog.check(self.name, stamps=self.reports.stamps, stopped=self.stopped, now=now)

    def last_step(self, *, attempt: int) -> int:
        """Return the newest step that it reported as finished in `attempt`, 0 for none."""
        return max((report.step for report in self.reports.readable if report.attempt == attempt), default=0)

    def observe(self, *, has_progressed: bool) -> RoleObservation:
        """Return what recovery has to know of it."""
        return RoleObservation(
            name=self.name,
            unit=self.child.spec.unit,
            node=self.child.spec.node,
            work=self.child.spec.work,
            does_finish=self.child.spec.does_finish,
            exit_code=self._exit_code,
            ended_at=self._ended_at,
            is_complete=self._is_complete,
            last_output_at=self._last_output_at,
            has_progressed=has_progressed,
            starts_after=self.child.spec.starts_after,
            is_waiting=any(report.waits_for == ORCHESTRATOR for report in self.reports.readable),
            stuck=self.stuck,
            last_log_line=self._last_log_line,
        )


def _normalize(lines: Sequence[str]) -> str:
    """Return the last of `lines` without what differs between two failures of one cause: the time, pids, seconds."""
    return _NUMBER.sub("#", _TIME.sub("", lines[-1])) if lines else ""
