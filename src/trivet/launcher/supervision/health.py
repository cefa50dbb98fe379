"""Reads what the roles report and warns of those that are stuck, and of a run in which nothing moves.

Called by the supervisor in each of its rounds. Ends nothing: what follows for a stuck role is for `recovery` to decide.
"""

from collections.abc import Collection

from trivet.config.layout import RunLayout
from trivet.config.sections.supervision import RecoveryConfig
from trivet.launcher.host import ProcessHost
from trivet.launcher.logs import RunLog
from trivet.launcher.supervision.clock import Clock
from trivet.launcher.supervision.restarts import RestartLog
from trivet.launcher.supervision.role_processes import RoleProcess
from trivet.launcher.supervision.stall import StallWatch, describe, pids_of, situation_of
from trivet.launcher.supervision.watchdog import Watchdog
from trivet.process.stacks import STACKS_WITHIN_S

_REPORT_INTERVAL_S = 1.0
"""Roles report once a second."""
_SCANS_PER_TIMEOUT = 12
"""Scans of every process of the machine within the watchdog's time: they cost, on a large machine."""


class RoleHealthMonitor:
    """Keeps `reports` and `stuck` of each role up to date.

    >>> monitor = RoleHealthMonitor(config, layout=layout, host=host, restarts=restarts, log=log, clock=Clock())
    >>> monitor.begin("trainer")
    >>> monitor.check(roles.values())
    True
    """

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
        role.watch(self._watchdog, now=now)
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
