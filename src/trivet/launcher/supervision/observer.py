"""Observes a run: the exits and output of its roles, the reports of their processes, and which servers answer.

The supervisor calls `Observer.update` in each of its rounds, and decides from the result of `Observer.observe`.

A process is stuck when it stops reporting. A role that waits still reports, so it is never stuck, however long it waits. A run
stalls when the content of all reports stays the same: then the roles wait for each other, or for something outside the run, and the
log warns. Each report is compared with the one before it, never with a clock.
"""

import http.client
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import msgspec

from trivet.exits import describe_exit
from trivet.launcher.logs import LogFollower, RunLog, is_for_terminal, last_lines
from trivet.launcher.plan import ORCHESTRATOR, TRAINER, TRAINING, ProcessSpec, RecoveryUnit
from trivet.launcher.processes import Clock, HostedProcess, ProcessHost, ReportStamp, RoleReports
from trivet.launcher.supervision.attempts import Attempts
from trivet.process.signals import Interrupts
from trivet.wire.status import RUNNING_GROUPS, ProcessReport

_READ_INTERVAL_S = 1.0
"""Seconds between two reads of the reports. Roles report once a second."""
_SCANS_PER_TIMEOUT = 12
"""Scans of all processes of the machine within the watchdog's time-out. A scan is slow on a large machine."""
FIRST_REPORT_S = 300.0
"""Longest time to a process's first report. It imports for seconds, on a loaded machine for minutes, before it can report."""
_MAX_GAP_S = 5.0
"""When two reads are further apart, the launcher itself was stopped. No process is blamed for that time."""
_HEALTH_CHECK_INTERVAL_S = 2.0
"""Seconds between two requests to a server that has not answered yet. It takes tens of seconds to load a model."""
_ANSWER_TIMEOUT_S = 1.0
"""Longest wait for a server's answer, because the supervisor waits meanwhile. The next check asks again."""
_LINE_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleObservation:
    """The state of a role at one moment, since its last start. Times are seconds of the monotonic clock."""

    spec: ProcessSpec
    exit_code: int | None = None
    """None while it runs."""
    ended_at: float = 0.0
    is_complete: bool = False
    """True when it recorded that it reached the last step."""
    last_output_at: float = 0.0
    has_progressed: bool = False
    """True when its unit has done some work since the start: see `Observer.has_progressed`."""
    is_waiting: bool = False
    """True when it waits for the orchestrator: meanwhile it neither takes nor frees memory of its GPUs."""
    stuck: str = ""
    """The reason why the watchdog treats it as stuck; empty when it does not."""
    last_log_line: str = ""
    """The last log line of a role that ended, without time and numbers. Two failures with equal lines count as the same error."""

    @property
    def name(self) -> str:
        """Name of the role."""
        return self.spec.name

    @property
    def unit(self) -> RecoveryUnit:
        """The unit with which it is restarted."""
        return self.spec.unit

    @property
    def was_killed(self) -> bool:
        """True when it was ended from outside: by a signal, or with its node."""
        return self.exit_code is not None and (self.exit_code < 0 or self.exit_code > 128)

    @property
    def cause(self) -> str:
        """The way in which it failed, as text for people."""
        if self.exit_code is None:
            return f"stuck: {self.stuck}"
        return describe_exit(self.exit_code) + (" before its last step" if self.exit_code == 0 else "")

    @property
    def signature(self) -> str:
        """A text made of the role and the cause of its failure. Two failures with equal signatures count as the same."""
        if self.exit_code is None:
            return f"{self.name} stuck"
        return f"{self.name} {self.exit_code} {'' if self.was_killed else self.last_log_line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """The state of a run at one moment, from which `Recovery.decide` decides."""

    now: float
    """Seconds of the monotonic clock."""
    roles: Mapping[str, RoleObservation]
    """The roles by their names."""
    interrupted_by: int | None = None
    """Number of the first signal that asked the launcher to end; None when none came."""
    is_repeated: bool = False
    """True when a second such signal came."""
    is_last_step_committed: bool = False
    """Only set when a role has ended or is stuck."""
    lost_nodes: frozenset[int] = frozenset()
    """Nodes that do not answer."""
    leaving_nodes: frozenset[int] = frozenset()
    """Other nodes on which a signal has asked the launcher to end."""

    def by_unit(self) -> Mapping[RecoveryUnit, Sequence[RoleObservation]]:
        """Return the roles of each unit."""
        units: dict[RecoveryUnit, list[RoleObservation]] = {}
        for role in self.roles.values():
            units.setdefault(role.unit, []).append(role)
        return units


class RoleProcess:
    """One started role, and the state in which it was seen last."""

    def __init__(self, child: HostedProcess, *, now: float, watched_s: float) -> None:
        self.child = child
        self.observation = RoleObservation(spec=child.spec, last_output_at=now)
        """The role at the last update. `Observer.observe` adds the fields that depend on the reports."""
        self.reports = RoleReports()
        """Reports of its processes at the last read."""
        self.stuck = ""
        """The reason why the watchdog treats it as stuck; empty when it does not."""
        self.stopped_pids: tuple[int, ...] = ()
        """Its processes that a signal has stopped, at the last scan."""
        self.stopped_since: float | None = None
        """Watched time at which the first of them was found; None while there is none."""
        self.started_at = watched_s
        """Watched time at the start: see `Observer`."""
        self.last_stamps: dict[str, tuple[ReportStamp, float]] = {}
        """The newest stamp of each process by name, and the watched time at which it was first read."""
        self._follower = LogFollower(child.spec.log, offset=child.log_offset)

    @property
    def name(self) -> str:
        """Name of the role."""
        return self.child.spec.name

    @property
    def is_running(self) -> bool:
        """True when it ran at the last update."""
        return self.observation.exit_code is None

    def poll(self, *, now: float, is_complete: Callable[[str], bool]) -> list[str]:
        """Update `observation` with new output and the exit. Return the lines that were added to the log.

        Args:
            is_complete: returns whether the role of the given name recorded that it reached the last step.
        """
        code, lines, spec = self.child.exit_code, self._follower.read_lines(), self.child.spec
        if lines:
            self.observation = replace(self.observation, last_output_at=now)
        if self.is_running and code is not None:
            last_line = "".join(last_lines(spec.log, offset=self.child.log_offset, count=1))
            self.stuck = ""
            self.observation = replace(
                self.observation,
                exit_code=code,
                ended_at=now,
                is_complete=code == 0 and (not spec.records_end or is_complete(self.name)),
                # Without the parts that differ between two failures with one cause: the time, pids, seconds.
                last_log_line=_NUMBER.sub("#", _LINE_TIME.sub("", last_line)),
            )
        return lines


class Observer:
    """Watches the newest process of each role, and computes the state of the run from their exits and reports.

    Watched time is the number of seconds for which this launcher has watched: it leaves out the time in which the launcher itself
    was stopped.
    """

    def __init__(self, attempts: Attempts, *, host: ProcessHost, log: RunLog, clock: Clock) -> None:
        self.roles: dict[str, RoleProcess] = {}
        """The newest process of each role, by the role's name."""
        self._attempts = attempts
        self._config = attempts.config.recovery
        self._host = host
        self._log = log
        self._clock = clock
        self._began = clock.now()
        self._unanswered: dict[RecoveryUnit, list[str]] = {
            unit: list(urls) for unit, urls in attempts.planned.server_urls.items()
        }
        """Addresses of the servers that have not answered since their last start, for each unit that has servers."""
        self._watched_s = 0.0
        """The watched time."""
        self._read_at: float | None = None
        """Time of the last read of the reports; None before the first."""
        self._read_due = self._scan_due = self._health_check_due = 0.0
        self._last_change: list[ProcessReport] = []
        """The reports, without their times, when one of them last changed."""
        self._unchanged_since = 0.0
        """Watched time of that change."""
        self._stall_due_s = self._config.stall_warn_s
        """Seconds without a change after which the next warning of a stall is due."""

    def add(self, child: HostedProcess) -> None:
        """Observe a process that was just started. It replaces the earlier process of the same role."""
        self.roles[child.spec.name] = RoleProcess(child, now=self._clock.now(), watched_s=self._watched_s)

    def restart(self, unit: RecoveryUnit, *, names: Iterable[str]) -> None:
        """Record that `unit` is started again, with the roles `names`. Its servers must answer again."""
        if unit in self._unanswered:
            self._unanswered[unit] = list(self._attempts.planned.server_urls[unit])
        # The new attempt may run on fewer nodes, and then it has fewer roles.
        removed = {name for name, role in self.roles.items() if role.observation.unit == unit}.difference(names)
        for name in removed:
            del self.roles[name]

    def update(self) -> list[RoleProcess]:
        """Poll exits and logs, send requests to servers that have not answered, and read reports. Return roles newly found stuck.

        Requests and reads happen only when they are due.
        """
        now = self._clock.now()
        for role in self.roles.values():
            was_running = role.is_running
            lines = role.poll(now=now, is_complete=self._attempts.has_completed)
            if was_running and not role.is_running:
                self._read_due = 0.0  # read now: its last report has the last step that it finished
            if role.child.spec.does_finish:
                for line in filter(is_for_terminal, lines):
                    self._log.write_line(line)
        if now >= self._health_check_due:
            self._health_check_due = now + _HEALTH_CHECK_INTERVAL_S
            # A unit that has ended gets no request: if its node was lost, the supervisor would wait in vain for each answer.
            ended_units = {role.observation.unit for role in self.roles.values() if not role.is_running}
            for unit, url in [
                (unit, url) for unit, urls in self._unanswered.items() if unit not in ended_units for url in urls
            ]:
                if is_healthy(url):
                    self._unanswered[unit].remove(url)
                    self._log.say(f"{unit} ready url={url} after {now - self._began:.0f} s")
        if now < self._read_due:
            return []
        self._read_due = now + _READ_INTERVAL_S
        return self._read_reports(now)

    def _read_reports(self, now: float) -> list[RoleProcess]:
        """Read all reports, scan for stopped processes when due, and warn of a stall. Return the roles newly found stuck."""
        if self._read_at is not None and now - self._read_at <= _MAX_GAP_S:
            self._watched_s += now - self._read_at
        self._read_at = now
        if now >= self._scan_due:
            self._scan_due = now + self._config.watchdog_timeout_s / _SCANS_PER_TIMEOUT
            found = self._host.find_stopped([role.child for role in self.roles.values()])
            for role, stopped in zip(self.roles.values(), found, strict=True):
                role.stopped_pids = stopped
        found_stuck: list[RoleProcess] = []
        for role in self.roles.values():
            role.reports = role.child.read_reports()
            if not role.is_running:
                continue
            was_stuck, role.stuck = role.stuck, self._why_stuck(role)
            if role.stuck and not was_stuck:
                found_stuck.append(role)
            elif was_stuck and not role.stuck:
                self._log.say(f"{role.name} reports again")
        self._check_stall()
        return found_stuck

    def _why_stuck(self, role: RoleProcess) -> str:
        """Describe which processes of a role have been silent or stopped for too long; empty when none has."""
        timeout_s, reasons = self._config.watchdog_timeout_s, list[str]()
        for name, stamp in role.reports.stamps.items():
            last_stamp, changed_at = role.last_stamps.get(name, (None, role.started_at))
            if stamp != last_stamp:
                changed_at = self._watched_s
                role.last_stamps[name] = (stamp, changed_at)
            silent_s = self._watched_s - changed_at
            if stamp is None and silent_s > max(timeout_s, FIRST_REPORT_S):
                reasons.append(f"{name} has not reported since its start {silent_s:.0f} s ago")
            elif stamp is not None and silent_s > timeout_s:
                reasons.append(f"{name} has not reported for {silent_s:.0f} s")
        if not role.stopped_pids:
            role.stopped_since = None
        elif role.stopped_since is None:
            role.stopped_since = self._watched_s
        elif (stopped_s := self._watched_s - role.stopped_since) > timeout_s:
            reasons.append(f"pid {', '.join(map(str, role.stopped_pids))} stopped by a signal {stopped_s:.0f} s ago")
        return "; ".join(reasons)

    def _check_stall(self) -> None:
        """Warn when no report has changed, times apart, for `recovery.stall_warn_s`, and again after each doubling of the time."""
        running = [role for role in self.roles.values() if role.is_running]
        reports = [report for role in running for report in role.reports.readable]
        reports_without_times = [
            msgspec.structs.replace(
                report,
                time=0.0,
                workers=[msgspec.structs.replace(worker, scoring_for_s=0.0, blocked_for_s=0.0) for worker in report.workers],
            )
            for report in reports
        ]
        if reports_without_times != self._last_change:
            self._last_change, self._unchanged_since = reports_without_times, self._watched_s
            self._stall_due_s = self._config.stall_warn_s
        if (still_s := self._watched_s - self._unchanged_since) < self._stall_due_s:
            return
        if self._stall_due_s == self._config.stall_warn_s:  # once only: stacks in the logs would look like progress
            for role in running:
                pids = [(report.pid, *(worker.pid for worker in report.workers)) for report in role.reports.readable]
                role.child.show_stacks(itertools.chain(*pids))
        self._stall_due_s *= 2
        self._log.say(
            f"WARNING nothing has moved for {still_s:.0f} s: {describe(reports)}\n"
            f"(recovery.stall_warn_s = {self._config.stall_warn_s:g}; the stacks of each process are in its log, under "
            f"{self._attempts.layout.logs})"
        )

    def is_answering(self, unit: RecoveryUnit) -> bool:
        """Return whether `unit` has servers, all of which have answered since its last start."""
        return unit in self._unanswered and not self._unanswered[unit]

    def has_progressed(self, unit: RecoveryUnit) -> bool:
        """Return whether `unit` has done some work since its start.

        Servers have when all of them have answered, the training unit when the trainer has finished a step, and environment workers
        of another node when they run groups.
        """
        if unit in self._unanswered:
            return self.is_answering(unit)
        if unit == TRAINING:
            return self.last_step() > (self._attempts.from_step or 0)
        workers = self.roles.get(unit)  # a unit of their own, with their name
        return workers is not None and any(report.activity == RUNNING_GROUPS for report in workers.reports.readable)

    def last_step(self) -> int:
        """Return the last step that the trainer of this attempt has finished, 0 for none."""
        reports = self.roles[TRAINER].reports.readable if TRAINER in self.roles else ()
        return max((report.step for report in reports if report.attempt == self._attempts.run.attempt), default=0)

    def observe(self, interrupts: Interrupts) -> RunObservation:
        """Return the state of the run.

        Raises:
            RunDirectoryBusy: another node leads the run now.
        """
        roles = {
            name: replace(
                role.observation,
                has_progressed=self.has_progressed(role.observation.unit),
                is_waiting=any(report.waits_for == ORCHESTRATOR for report in role.reports.readable),
                stuck=role.stuck,
            )
            for name, role in self.roles.items()
        }
        has_trouble = any(role.exit_code is not None or role.stuck for role in roles.values())
        return RunObservation(
            now=self._clock.now(),
            roles=roles,
            interrupted_by=interrupts.first,
            is_repeated=interrupts.is_repeated,
            is_last_step_committed=has_trouble and self._attempts.is_last_step_committed,
            lost_nodes=self._host.lost_nodes(),
            leaving_nodes=self._host.leaving_nodes(),
        )


def is_healthy(base_url: str) -> bool:
    """Return whether the server at `base_url` answers GET /health with 200."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def describe(reports: Iterable[ProcessReport]) -> str:
    """Describe the activity of each process, or the thing for which it waits and the role that should provide it."""
    clauses: list[str] = []
    for report in reports:
        name = report.role if report.num_ranks == 1 else f"{report.role} rank {report.rank}"
        activity = f"waits for {report.activity} (from {report.waits_for})" if report.waits_for else report.activity
        if report.num_in_flight is not None:
            activity += f" with {report.num_in_flight} groups in flight, {report.num_ready or 0} ready"
        clauses.append(f"{name}: {activity}")
        for worker in report.workers:
            if worker.num_pending:
                rollouts = f"{worker.num_generating} rollouts generating, {worker.num_scoring} scoring"
                clauses.append(f"environment {worker.env}: {worker.num_pending} groups pending, {rollouts}")
    return "; ".join(clauses)
