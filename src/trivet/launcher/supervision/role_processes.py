"""Follows one started role: its exit, its log, and what its processes report."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.config.layout import RunLayout
from trivet.launcher.logs import LogFollower, last_lines
from trivet.launcher.processes import Child
from trivet.launcher.supervision.recovery import RoleObservation
from trivet.launcher.supervision.watchdog import ReportStamp, Watchdog
from trivet.process.process_table import ProcessTable, descendants
from trivet.telemetry.process_report import read_report
from trivet.wire.status import ProcessReport

_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReports:
    """The reports of a role's processes."""

    readable: tuple[ProcessReport, ...]
    """Those that could be read."""
    stamps: Mapping[str, ReportStamp]
    """A value that changes when a process reports again, by the name of the process."""


class RoleProcess:
    """One started role.

    >>> role = RoleProcess(host.start(spec), now=clock.now())
    >>> lines = role.poll(now=clock.now(), is_complete=has_completed)
    >>> role.observe(has_progressed=False).exit_code is None
    True
    """

    def __init__(self, child: Child, *, now: float) -> None:
        self.child = child
        self.started_at = now
        self.reports = RoleReports(readable=(), stamps={})
        self.stuck = ""
        """The reason why the watchdog treats it as stuck; empty when it does not."""
        self._stopped: tuple[int, ...] = ()
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
            self._is_complete = code == 0 and is_complete(self.name)
            self._last_log_line = _normalize(last_lines(self.child.spec.log, offset=self.child.log_offset, count=1))
        return lines

    def read_reports(self, layout: RunLayout) -> None:
        """Read what its processes report now."""
        self.reports = read_reports(layout, self.name, count=self.child.spec.num_reports)

    def find_stopped(self, table: ProcessTable) -> None:
        """Find those of its processes that a signal has stopped."""
        family = [self.child.pid]
        if self.child.spec.are_children_watched:
            family += descendants(self.child.pid, table=table)
        self._stopped = tuple(pid for pid in family if pid in table and table[pid].is_stopped)

    def watch(self, watchdog: Watchdog, *, now: float) -> None:
        """Update `stuck`."""
        if self._exit_code is None:
            self.stuck = watchdog.check(self.name, stamps=self.reports.stamps, stopped=self._stopped, now=now)

    def last_step(self, *, attempt: int) -> int:
        """Return the newest step that it reported as finished in `attempt`, 0 for none."""
        return max((report.step for report in self.reports.readable if report.attempt == attempt), default=0)

    def observe(self, *, has_progressed: bool) -> RoleObservation:
        """Return what recovery has to know of it."""
        return RoleObservation(
            name=self.name,
            unit=self.child.spec.unit,
            does_finish=self.child.spec.does_finish,
            exit_code=self._exit_code,
            ended_at=self._ended_at,
            is_complete=self._is_complete,
            last_output_at=self._last_output_at,
            has_progressed=has_progressed,
            stuck=self.stuck,
            last_log_line=self._last_log_line,
        )


def read_reports(layout: RunLayout, role: str, *, count: int) -> RoleReports:
    """Read the reports of the `count` processes of a role. One that cannot be read still has a stamp: its process lives."""
    readable: list[ProcessReport] = []
    stamps: dict[str, ReportStamp] = {}
    for rank in range(count):
        path = layout.report_file(role, rank)
        stamps[role if count == 1 else f"{role} rank {rank} of {count}"] = _stamp(path)
        try:
            report = read_report(path)
        except msgspec.DecodeError:
            continue
        if report is not None:
            readable.append(report)
    return RoleReports(readable=tuple(readable), stamps=stamps)


def _stamp(path: Path) -> ReportStamp:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def forget_reports(layout: RunLayout, role: str, *, count: int) -> None:
    """Remove what the role's processes said before they are started again."""
    for rank in range(count):
        layout.report_file(role, rank).unlink(missing_ok=True)


def _normalize(lines: Sequence[str]) -> str:
    """Return the last of `lines` without what differs between two failures of one cause: the time, pids, seconds."""
    return _NUMBER.sub("#", _TIME.sub("", lines[-1])) if lines else ""
