"""Observes a run: the exits and output of its roles, the reports of their processes, and which servers answer.

The supervisor looks in each of its rounds, and decides from what `Observer.observe` returns. A role that waits reports that it
waits, and is not stuck however long. When nothing changes that the roles report, they wait for each other, or for something that
none of them sees: that is a stall, of which the log warns. Reports are compared with what they were, never with a clock.
"""

import http.client
import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import msgspec

from trivet.exits import describe_exit
from trivet.launcher.logs import LogFollower, RunLog, is_for_terminal, last_lines
from trivet.launcher.plan import ORCHESTRATOR, TRAINER, TRAINING, ProcessSpec, RecoveryUnit
from trivet.launcher.processes import HostedProcess, ProcessHost, ReportStamp, RoleReports
from trivet.launcher.supervision.attempts import Attempts
from trivet.process.signals import Interrupts
from trivet.wire.status import RUNNING_GROUPS, ProcessReport

_REPORT_INTERVAL_S = 1.0
"""Roles report once a second."""
_SCANS_PER_TIMEOUT = 12
"""Scans of every process of the machine within the watchdog's time: they cost, on a large machine."""
FIRST_REPORT_S = 300.0
"""A process imports for seconds, on a loaded machine for minutes, before it can report."""
_MAX_GAP_S = 5.0
"""Looks further apart than this say that the launcher itself was stopped: that time counts for nobody, and nothing could move."""
_PROBE_INTERVAL_S = 2.0
"""A server that loads a model takes tens of seconds; more requests would find out nothing sooner."""
_ANSWER_TIMEOUT_S = 1.0
"""The supervisor waits for the answer. A server that takes longer is asked again."""
_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Functions that tell and spend time. Tests pass a clock that they move themselves."""

    now: Callable[[], float] = time.monotonic
    """Monotonic seconds, for durations."""
    unix_time: Callable[[], float] = time.time
    """Seconds since 1970, for people."""
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleObservation:
    """The state of a role at one moment, since it was started last. Times are of one monotonic clock."""

    spec: ProcessSpec
    exit_code: int | None = None
    ended_at: float = 0.0
    is_complete: bool = False
    """True when it recorded that it reached the last step."""
    last_output_at: float = 0.0
    has_progressed: bool = False
    """True when a step was finished since the start of its unit, or its servers have answered."""
    is_waiting: bool = False
    """True when it waits for another role: it takes no more memory of its GPUs, and frees none."""
    stuck: str = ""
    """The reason why the watchdog treats it as stuck; empty when it does not."""
    last_log_line: str = ""
    """The last line of the log of a role that ended, without numbers: it tells one error from another."""

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
        """The way in which it failed, for people."""
        if self.exit_code is None:
            return f"stuck: {self.stuck}"
        return describe_exit(self.exit_code) + (" before its last step" if self.exit_code == 0 else "")

    @property
    def signature(self) -> str:
        """Return the role and cause of the failure. Two failures with equal ones count as the same."""
        if self.exit_code is None:
            return f"{self.name} stuck"
        return f"{self.name} {self.exit_code} {'' if self.was_killed else self.last_log_line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """The state of a run at one moment: what a decision is made from."""

    now: float
    roles: Mapping[str, RoleObservation]
    interrupted_by: int | None = None
    """Number of the first signal that came."""
    is_repeated: bool = False
    """True when a second one came."""
    is_last_step_committed: bool = False
    lost_nodes: frozenset[int] = frozenset()
    leaving_nodes: frozenset[int] = frozenset()
    """Nodes that a signal has asked to end, while this one goes on."""

    def by_unit(self) -> Mapping[RecoveryUnit, Sequence[RoleObservation]]:
        """Return the roles of each unit."""
        units: dict[RecoveryUnit, list[RoleObservation]] = {}
        for role in self.roles.values():
            units.setdefault(role.unit, []).append(role)
        return units


class RoleProcess:
    """One started role, and what was observed of it."""

    def __init__(self, child: HostedProcess, *, now: float, watched_s: float) -> None:
        self.child = child
        self.seen = RoleObservation(spec=child.spec, last_output_at=now)
        """The role at the last look, but for what its reports say."""
        self.reports = RoleReports()
        """Reports of its processes when the host was last asked."""
        self.stuck = ""
        """The reason why the watchdog treats it as stuck; empty when it does not."""
        self.stopped: tuple[int, ...] = ()
        """Pids of those of its processes that a signal has stopped."""
        self.stopped_since: float | None = None
        """Watched time at which the first of them was found."""
        self.started_at = watched_s
        self.heard: dict[str, tuple[ReportStamp, float]] = {}
        """The newest stamp of each process, and the watched time at which it was new."""
        self._follower = LogFollower(child.spec.log, offset=child.log_offset)

    @property
    def name(self) -> str:
        """Name of the role."""
        return self.child.spec.name

    @property
    def is_running(self) -> bool:
        """True when it ran at the last look."""
        return self.seen.exit_code is None

    def poll(self, *, now: float, is_complete: Callable[[str], bool]) -> list[str]:
        """Notice new output and the exit; returns the lines that were added to the log.

        `is_complete` says whether the role of that name recorded that it reached the last step.
        """
        code, lines, spec = self.child.exit_code, self._follower.read_lines(), self.child.spec
        if lines:
            self.seen = replace(self.seen, last_output_at=now)
        if self.is_running and code is not None:
            last = "".join(last_lines(spec.log, offset=self.child.log_offset, count=1))
            self.stuck = ""
            self.seen = replace(
                self.seen,
                exit_code=code,
                ended_at=now,
                is_complete=code == 0 and (not spec.records_end or is_complete(self.name)),
                # Without what differs between two failures of one cause: the time, pids, seconds.
                last_log_line=_NUMBER.sub("#", _TIME.sub("", last)),
            )
        return lines


class Observer:
    """The newest process of each role, and the state of the run as their reports show it."""

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
        """Addresses of each unit's servers that have not answered since its last start."""
        self._watched_s = 0.0
        """Seconds for which this launcher has watched: its clock without the time in which it was stopped itself."""
        self._read_at: float | None = None
        self._read_due = self._scan_due = self._probe_due = 0.0
        self._situation: list[ProcessReport] = []
        """Everything that the processes report but the time, when that changed last."""
        self._unchanged_since = 0.0
        self._stall_due_s = self._config.stall_warn_s

    def add(self, child: HostedProcess) -> None:
        """Observe a process from its start on, in the place of the one before of the same role."""
        self.roles[child.spec.name] = RoleProcess(child, now=self._clock.now(), watched_s=self._watched_s)

    def restart(self, unit: RecoveryUnit, *, names: Iterable[str]) -> None:
        """Note that `unit` is started again with the roles `names`: its servers have to answer anew."""
        if unit in self._unanswered:
            self._unanswered[unit] = list(self._attempts.planned.server_urls[unit])
        # An attempt may have fewer nodes.
        gone = {name for name, role in self.roles.items() if role.seen.unit == unit}.difference(names)
        for name in gone:
            del self.roles[name]

    def look(self) -> list[RoleProcess]:
        """Notice exits, show new log lines, ask servers, and read the reports when due; return the roles found stuck."""
        now = self._clock.now()
        for role in self.roles.values():
            was_running = role.is_running
            lines = role.poll(now=now, is_complete=self._attempts.has_completed)
            if was_running and not role.is_running:
                self._read_due = 0.0  # its last report says how far it came
            if role.child.spec.does_finish:
                for line in filter(is_for_terminal, lines):
                    self._log.write_line(line)
        if now >= self._probe_due:
            self._probe_due = now + _PROBE_INTERVAL_S
            # A server that was lost with its node would have the supervisor wait, each time, for an answer that cannot come.
            ended = {role.seen.unit for role in self.roles.values() if not role.is_running}
            for unit, url in [(unit, url) for unit, urls in self._unanswered.items() if unit not in ended for url in urls]:
                if answers(url):
                    self._unanswered[unit].remove(url)
                    self._log.say(f"{unit} ready url={url} after {now - self._began:.0f} s")
        if now < self._read_due:
            return []
        self._read_due = now + _REPORT_INTERVAL_S
        return self._read_reports(now)

    def _read_reports(self, now: float) -> list[RoleProcess]:
        if self._read_at is not None and now - self._read_at <= _MAX_GAP_S:
            self._watched_s += now - self._read_at
        self._read_at = now
        if now >= self._scan_due:
            self._scan_due = now + self._config.watchdog_timeout_s / _SCANS_PER_TIMEOUT
            found = self._host.find_stopped([role.child for role in self.roles.values()])
            for role, stopped in zip(self.roles.values(), found, strict=True):
                role.stopped = stopped
        found_stuck: list[RoleProcess] = []
        for role in self.roles.values():
            role.reports = self._host.read_reports(role.child)
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
        """Return which processes of a role are silent or stopped for too long; empty when none is."""
        timeout_s, reasons = self._config.watchdog_timeout_s, list[str]()
        for name, stamp in role.reports.stamps.items():
            before, heard_at = role.heard.get(name, (None, role.started_at))
            if stamp != before:
                role.heard[name], heard_at = (stamp, self._watched_s), self._watched_s
            silent_s = self._watched_s - heard_at
            if stamp is None and silent_s > max(timeout_s, FIRST_REPORT_S):
                reasons.append(f"{name} has not reported since its start {silent_s:.0f} s ago")
            elif stamp is not None and silent_s > timeout_s:
                reasons.append(f"{name} has not reported for {silent_s:.0f} s")
        if not role.stopped:
            role.stopped_since = None
        elif role.stopped_since is None:
            role.stopped_since = self._watched_s
        elif (stopped_s := self._watched_s - role.stopped_since) > timeout_s:
            reasons.append(f"pid {', '.join(map(str, role.stopped))} stopped by a signal {stopped_s:.0f} s ago")
        return "; ".join(reasons)

    def _check_stall(self) -> None:
        """Warn when nothing that the roles report has changed for a time, and again after twice the time."""
        running = [role for role in self.roles.values() if role.is_running]
        reports = [report for role in running for report in role.reports.readable]
        situation = [
            msgspec.structs.replace(
                report,
                time=0.0,
                workers=[msgspec.structs.replace(worker, scoring_for_s=0.0, blocked_for_s=0.0) for worker in report.workers],
            )
            for report in reports
        ]
        if situation != self._situation:
            self._situation, self._unchanged_since = situation, self._watched_s
            self._stall_due_s = self._config.stall_warn_s
        if (still_s := self._watched_s - self._unchanged_since) < self._stall_due_s:
            return
        if self._stall_due_s == self._config.stall_warn_s:  # what is written often would pass for a sign of life
            for role in running:
                pids = [(report.pid, *(worker.pid for worker in report.workers)) for report in role.reports.readable]
                self._host.show_stacks(role.child, itertools.chain(*pids))
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
        """Return whether every server of `unit` has answered, its workers run groups, or the trainer has finished a step."""
        if unit in self._unanswered:
            return self.is_answering(unit)
        if unit == TRAINING:
            return self.last_step() > (self._attempts.from_step or 0)
        roles = [role for role in self.roles.values() if role.seen.unit == unit]
        return any(report.activity == RUNNING_GROUPS for role in roles for report in role.reports.readable)

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
                role.seen,
                has_progressed=self.has_progressed(role.seen.unit),
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


def answers(base_url: str) -> bool:
    """Return whether GET /health of the server at `base_url` says 200."""
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
    """Say who does what, or waits for what from whom, for the line that names a stall."""
    clauses: list[str] = []
    for report in reports:
        name = report.role if report.num_ranks == 1 else f"{report.role} rank {report.rank}"
        doing = f"waits for {report.activity} (from {report.waits_for})" if report.waits_for else report.activity
        if report.num_in_flight is not None:
            doing += f" with {report.num_in_flight} groups in flight, {report.num_ready or 0} ready"
        clauses.append(f"{name}: {doing}")
        for worker in report.workers:
            if worker.num_pending:
                at = f"{worker.num_generating} rollouts generating, {worker.num_scoring} scoring"
                clauses.append(f"environment {worker.env}: {worker.num_pending} groups pending, {at}")
    return "; ".join(clauses)
