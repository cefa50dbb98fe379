"""Reads what the roles report and warns of those that are stuck, and of a run in which nothing moves.

Called by the supervisor in each of its rounds. Ends nothing: what follows for a stuck role is for `recovery` to decide.
A role that waits reports that it waits, and is not stuck however long. When nothing changes that the roles report, they wait for
each other, or for something that none of them sees: that is a stall. Reports are compared with what they were, never with a clock.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from trivet.config.layout import RunLayout
from trivet.config.schema.deployment import RecoveryConfig
from trivet.launcher.host import ProcessHost
from trivet.launcher.logs import RunLog
from trivet.launcher.reports import ReportStamp
from trivet.launcher.supervision.restarts import RestartLog
from trivet.launcher.supervision.role_processes import Clock, RoleProcess
from trivet.process.stacks import STACKS_WITHIN_S
from trivet.wire.status import ProcessReport, WorkerStatus

_REPORT_INTERVAL_S = 1.0
"""Roles report once a second."""
_SCANS_PER_TIMEOUT = 12
"""Scans of every process of the machine within the watchdog's time: they cost, on a large machine."""
FIRST_REPORT_S = 300.0
"""A process imports for seconds, on a loaded machine for minutes, before it can report."""
_MAX_CHECK_GAP_S = 5.0
"""Checks further apart than this say that the launcher itself was stopped: that time counts for nobody, and nothing could move."""

Situation = tuple[object, ...]


@dataclass(slots=True)
class _LastChange:
    stamp: ReportStamp
    at: float


class Watchdog:
    """Compares the reports of each role with what they were before."""

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


class StallWatch:
    """Measures for how long nothing that the roles report has changed."""

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


class RoleHealthMonitor:
    """Keeps `reports` and `stuck` of each role up to date."""

    def __init__(
        self, config: RecoveryConfig, *, layout: RunLayout, host: ProcessHost, restarts: RestartLog, log: RunLog, clock: Clock
    ) -> None:
        self._config = config
        self._layout = layout
        self._host = host
        self._restarts = restarts
        self._log = log
        self._clock = clock
        self._watchdog = Watchdog(timeout_s=config.watchdog_timeout_s)
        self._stalls = StallWatch(after_s=config.stall_warn_s)
        self._check_due = self._scan_due = 0.0

    def begin(self, role: str) -> None:
        """Note that `role` was started, again or for the first time."""
        self._watchdog.begin(role, now=self._clock.now())

    def check_at_once(self) -> None:
        """Have the next check take place without waiting: the last report of a role that ended says how far it came."""
        self._check_due = 0.0

    def check(self, roles: Collection[RoleProcess]) -> bool:
        """Read the reports, if that is due; returns whether it was."""
        now = self._clock.now()
        if now < self._check_due:
            return False
        self._check_due = now + _REPORT_INTERVAL_S
        self._watchdog.notice_time(now)
        if now >= self._scan_due:
            self._scan_due = now + self._config.watchdog_timeout_s / _SCANS_PER_TIMEOUT
            found = self._host.find_stopped([role.child for role in roles])
            for role, stopped in zip(roles, found, strict=True):
                role.stopped = stopped
        for role in roles:
            role.reports = self._host.read_reports(role.child)
            self._check_role(role, now=now)
        self._check_stall(roles, now=now)
        return True

    def _check_role(self, role: RoleProcess, *, now: float) -> None:
        was_stuck = bool(role.stuck)
        if role.is_running:
            role.stuck = self._watchdog.check(role.name, stamps=role.reports.stamps, stopped=role.stopped, now=now)
        if role.stuck and not was_stuck:
            self._restarts.warn_stuck(
                role,
                hint=f"(recovery.watchdog_timeout_s = {self._config.watchdog_timeout_s:g}, "
                f'recovery.on_stuck = "{self._config.on_stuck}")',
            )
            self._host.show_stacks(role.child, (report.pid for report in role.reports.readable))
            self._clock.sleep(STACKS_WITHIN_S)
        elif was_stuck and not role.stuck:
            self._log.say(f"{role.name} reports again")

    def _check_stall(self, roles: Collection[RoleProcess], *, now: float) -> None:
        running = [role for role in roles if role.is_running]
        reports = [report for role in running for report in role.reports.readable]
        still_s = self._stalls.check(situation_of(reports), now=now)
        if still_s is None:
            return
        if self._stalls.is_first:  # what is written often would pass for a sign of life
            for role in running:
                self._host.show_stacks(role.child, pids_of(role.reports.readable))
        self._log.say(
            f"WARNING nothing has moved for {still_s:.0f} s: {describe(reports)}\n"
            f"(recovery.stall_warn_s = {self._config.stall_warn_s:g}; the stacks of each process are in its log, under "
            f"{self._layout.logs})"
        )
