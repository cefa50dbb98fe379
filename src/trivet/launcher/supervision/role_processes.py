"""The started roles as the supervisor sees them: their exits, their logs and what they report."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.config.layout import RunLayout
from trivet.launcher.logs import LogFollower, last_lines
from trivet.launcher.processes import Child
from trivet.launcher.supervision.recovery import RoleObservation
from trivet.launcher.supervision.watchdog import Mark, Watchdog
from trivet.process_table import ProcessTable, descendants
from trivet.telemetry.process_report import read_report
from trivet.wire.status import ProcessReport

_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """What a role's processes say about themselves, and the marks by which a change shows."""

    said: tuple[ProcessReport, ...]
    marks: Mapping[str, Mark]


class RoleProcess:
    """One started role.

    >>> role_process = RoleProcess(start(spec, ...), now=clock())
    >>> lines = role_process.look(now=clock(), is_complete=has_completed)
    >>> role_process.observe().exit_code is None
    True
    """

    def __init__(self, child: Child, *, now: float) -> None:
        self.child = child
        self.reports = Reports(said=(), marks={})
        self.stuck = ""
        self._stopped: tuple[int, ...] = ()
        self._follower = LogFollower(child.spec.log, offset=child.log_offset)
        self._exit_code: int | None = None
        self._ended_at = 0.0
        self._is_complete = False
        self._last_output_at = now
        self._last_words = ""

    @property
    def name(self) -> str:
        return self.child.spec.name

    @property
    def is_running(self) -> bool:
        """As of the last look."""
        return self._exit_code is None

    def look(self, *, now: float, is_complete: Callable[[str], bool]) -> list[str]:
        """Notice what has changed; returns the lines that were added to the log."""
        code = self.child.exit_code
        lines = self._follower.read_lines()
        if lines:
            self._last_output_at = now
        if self._exit_code is None and code is not None:
            self._exit_code, self._ended_at, self.stuck = code, now, ""
            self._is_complete = code == 0 and is_complete(self.name)
            self._last_words = _last_words(last_lines(self.child.spec.log, offset=self.child.log_offset, count=1))
        return lines

    def read_reports(self, layout: RunLayout) -> None:
        self.reports = read_reports(layout, self.name, count=self.child.spec.num_reports)

    def look_for_stopped(self, table: ProcessTable) -> None:
        """Which of its processes a signal has stopped."""
        family = [self.child.pid]
        if self.child.spec.are_children_watched:
            family += descendants(self.child.pid, table=table)
        self._stopped = tuple(pid for pid in family if pid in table and table[pid].is_stopped)

    def watch(self, watchdog: Watchdog, *, now: float) -> None:
        """Bring `stuck` up to date."""
        if self._exit_code is None:
            self.stuck = watchdog.look(self.name, marks=self.reports.marks, stopped=self._stopped, now=now)

    def last_step(self, *, attempt: int) -> int:
        """The newest step that it reported as finished in `attempt`."""
        return max((report.step for report in self.reports.said if report.attempt == attempt), default=0)

    def observe(self, *, has_progressed: bool) -> RoleObservation:
        return RoleObservation(
            name=self.name,
            does_finish=self.child.spec.does_finish,
            exit_code=self._exit_code,
            ended_at=self._ended_at,
            is_complete=self._is_complete,
            last_output_at=self._last_output_at,
            has_progressed=has_progressed,
            stuck=self.stuck,
            last_words=self._last_words,
        )


def read_reports(layout: RunLayout, role: str, *, count: int) -> Reports:
    """Of the `count` processes of a role. A report that cannot be read counts as a sign of life and says nothing."""
    said: list[ProcessReport] = []
    marks: dict[str, Mark] = {}
    for rank in range(count):
        path = layout.report_file(role, rank)
        marks[role if count == 1 else f"{role} rank {rank} of {count}"] = _mark(path)
        try:
            report = read_report(path)
        except msgspec.DecodeError:
            continue
        if report is not None:
            said.append(report)
    return Reports(said=tuple(said), marks=marks)


def _mark(path: Path) -> Mark:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def forget_reports(layout: RunLayout, role: str, *, count: int) -> None:
    """Remove what the role's processes said before they are started again."""
    for rank in range(count):
        layout.report_file(role, rank).unlink(missing_ok=True)


def _last_words(lines: Sequence[str]) -> str:
    """Without what differs between two failures of one cause: the time, pids, seconds."""
    return _NUMBER.sub("#", _TIME.sub("", lines[-1])) if lines else ""
