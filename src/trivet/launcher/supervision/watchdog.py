"""Decides which process is stuck: one whose report does not change any more, or that was stopped. Pure.

A role that waits reports that it waits: it is not stuck, however long. Reports are compared with what they were, never with a
clock of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trivet.launcher.reports import ReportStamp

FIRST_REPORT_S = 300.0
"""A process imports for seconds, on a loaded machine for minutes, before it can report."""
_MAX_CHECK_GAP_S = 5.0
"""Checks further apart than this say that the launcher itself was stopped: that time counts for nobody."""


@dataclass(slots=True)
class _LastChange:
    stamp: ReportStamp
    at: float


class Watchdog:
    """Compares the reports of each role with what they were before.

    >>> watchdog = Watchdog(timeout_s=120.0)
    >>> watchdog.begin("trainer", now=0.0)
    >>> watchdog.check("trainer", stamps={"trainer": None}, stopped=(), now=1.0)
    ''
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changes: dict[str, dict[str, _LastChange]] = {}
        self._started: dict[str, float] = {}
        self._stopped_at: dict[str, float] = {}
        self._checked_at: float | None = None

    def begin(self, role: str, *, now: float) -> None:
        """Note that `role` was started, again or for the first time."""
        self._changes[role] = {}
        self._started[role] = now
        self._stopped_at.pop(role, None)

    def notice_time(self, now: float) -> None:
        """Note the time, before each round of checks; a gap says that the launcher itself was stopped."""
        if self._checked_at is not None and (away_s := now - self._checked_at) > _MAX_CHECK_GAP_S:
            for role in self._started:
                self._started[role] += away_s
                for change in self._changes[role].values():
                    change.at += away_s
            self._stopped_at.clear()
        self._checked_at = now

    def check(self, role: str, *, stamps: Mapping[str, ReportStamp], stopped: tuple[int, ...], now: float) -> str:
        """Return why `role` is stuck, empty when it is not.

        Args:
            stamps: by the name of each process of the role that reports.
            stopped: pids of the role's processes that a signal has stopped.
        """
        reasons: list[str] = []
        for name, stamp in stamps.items():
            change = self._changes[role].setdefault(name, _LastChange(None, self._started[role]))
            if stamp != change.stamp:
                change.stamp, change.at = stamp, now
            silent_s = now - change.at
            if change.stamp is None and silent_s > max(self._timeout_s, FIRST_REPORT_S):
                reasons.append(f"{name} has not reported since its start {silent_s:.0f} s ago")
            elif change.stamp is not None and silent_s > self._timeout_s:
                reasons.append(f"{name} has not reported for {silent_s:.0f} s")
        if not stopped:
            self._stopped_at.pop(role, None)
        elif now - self._stopped_at.setdefault(role, now) > self._timeout_s:
            pids = ", ".join(map(str, stopped))
            reasons.append(f"pid {pids} stopped by a signal {now - self._stopped_at[role]:.0f} s ago")
        return "; ".join(reasons)
