"""Runs the roles of a run to its end: starts them, observes them, carries out the decisions of `recovery`, and ends all processes.

One round of the loop, every `_POLL_INTERVAL_S`:

    exits, logs, reports, servers --> Observer --> RunObservation --> Recovery.decide (pure) --> actions
    SIGINT, SIGTERM, SIGHUP --------> Interrupts --^                                               |
                                                                                                   v
    role processes <--start, signal-- ProcessHost <----------------------------- Supervisor._carry_out
    rl.log, events.jsonl, status.json, terminal <----- StatusReporter <---------------+

consumes: the roles' exits, logs and reports
produces: the exit code of the run, status.json and Restart events
waits for: the clock alone: every input is polled, and a server has a second to answer
unblocked by: the clock

The loop ends when `Recovery` returns `FinishRun`, and decides nothing itself.
"""

import signal

from trivet.errors import NodesMissing, RunDirectoryBusy, TrivetError
from trivet.key_names import key_name
from trivet.launcher.logs import RunLog
from trivet.launcher.plan import ORCHESTRATOR, TRAINING, ProcessSpec, RecoveryUnit
from trivet.launcher.processes import SYSTEM_CLOCK, Clock, ProcessHost
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.observer import Observer
from trivet.launcher.supervision.recovery import (
    AnnounceRestart,
    FinishRun,
    PreemptRun,
    Recovery,
    RecoveryAction,
    StartUnit,
    StopRoles,
)
from trivet.launcher.supervision.status import StatusReporter
from trivet.process.signals import STACKS_WITHIN_S, Interrupts
from trivet.wire.events import Restart
from trivet.wire.status import RunState
from trivet.wire.versions import Step

_POLL_INTERVAL_S = 0.2
_REPEATED_SIGNAL_S = 1.0
"""One Ctrl-C may arrive twice. A signal that comes this long after the roles began to stop is a new one: kill them now."""


class Supervisor:
    """Supervises one run."""

    def __init__(self, attempts: Attempts, *, host: ProcessHost, log: RunLog, clock: Clock = SYSTEM_CLOCK) -> None:
        """Prepare the parts; nothing is started."""
        self._attempts = attempts
        self._host = host
        self._log = log
        self._clock = clock
        self._started = clock.now()
        self._error: TrivetError | None = None
        """The error that ended the run in the place of a decision."""
        self._recovery = Recovery(attempts.config)
        self._observer = Observer(attempts, host=host, log=log, clock=clock)
        self._status = StatusReporter(attempts, observer=self._observer, recovery=self._recovery, log=log, clock=clock)

    def run(self) -> int:
        """Start the roles, supervise them to the end of the run, and return its exit code."""
        with Interrupts(clock=self._clock.now) as interrupts:
            try:
                end = self._supervise(interrupts)
                if not self._must_not_lead:
                    self._announce(end)
            finally:
                if not self._must_not_lead:
                    self._log.close()
                patient_until, timeout_s = self._clock.now() + _REPEATED_SIGNAL_S, self._attempts.config.shutdown_timeout_s
                killed = self._host.stop(
                    [role.child for role in self._observer.roles.values()],
                    timeout_s=timeout_s,
                    is_hurried=lambda: interrupts.has_any_since(patient_until),
                )
                self._host.end_orphans()
                for child in killed:
                    self._log.say(f"{child.spec.name} did not end within {timeout_s:g} s of SIGTERM and was killed")
            if self._must_not_lead:  # only after the processes have ended: the log's directory may not answer for a while
                self._log.close()
                self._announce(end)
            self._status.summarize_restarts()
            last = self._attempts.last_commit
            if end.outcome is not RunState.DONE and last is not None and not self._attempts.is_last_step_committed:
                self._log.say(f"committed up to step {last}; go on from there with {key_name('--ckpt.resume-step -1')}")
            if not isinstance(self._error, RunDirectoryBusy):  # in that case status.json belongs to the node that leads now
                self._status.write(end)
        return end.exit_code

    @property
    def _must_not_lead(self) -> bool:
        """True when another node leads the run or may lead it soon. Then the processes must end before anything is written."""
        return isinstance(self._error, RunDirectoryBusy | NodesMissing)

    def _supervise(self, interrupts: Interrupts) -> FinishRun:
        """Start and watch the roles, and return the end of the run. An error that prevents a restart is an end too."""
        try:
            self._start_all(interrupts)
            return self._watch(interrupts)
        except TrivetError as exc:
            self._error = exc
            reason = str(exc) if self._must_not_lead else f"no restart is possible: {exc}"
            return FinishRun(outcome=RunState.FAILED, exit_code=exc.exit_code, reason=reason)

    def _start_all(self, interrupts: Interrupts) -> None:
        """Start all roles. A role that shares a GPU with a server starts only after the server has answered.

        When a role ends or a signal comes, the remaining roles are started at once: `_watch` deals with it, and needs all roles.
        """
        waiting = list(self._attempts.planned.processes)
        while True:
            self._host.lost_nodes()  # raises when another node leads the run
            self._update()
            has_ended = not all(role.is_running for role in self._observer.roles.values())
            has_trouble = interrupts.first is not None or has_ended
            roles = self._observer.roles.items()
            answering = {name for name, role in roles if self._observer.is_answering(role.observation.unit)}
            for spec in [spec for spec in waiting if has_trouble or answering.issuperset(spec.starts_after)]:
                waiting.remove(spec)
                self._start(spec)
            if not waiting:
                return
            self._status.write_when_due()
            self._clock.sleep(_POLL_INTERVAL_S)

    def _start(self, spec: ProcessSpec) -> None:
        child = self._host.start(spec)
        self._observer.add(child)
        where = f"pid={child.pid}" if child.pid else f"on node {spec.node}"
        self._log.say(f"started {spec.name} {where} log={spec.log}")

    def _watch(self, interrupts: Interrupts) -> FinishRun:
        """Observe the roles and carry out the decisions of `Recovery`, until one is to end the run."""
        while True:
            self._update()
            if self._host.joined_nodes():
                self._start_joined()
            for unit in self._status.units_down:
                if self._recovery.is_running(unit) and self._observer.has_progressed(unit):
                    self._status.end_restart(unit)
            actions = self._recovery.decide(self._observer.observe(interrupts))
            servers = {action.unit for action in actions if isinstance(action, StartUnit) and action.unit != TRAINING}
            if servers:
                self._attempts.plan_again(servers)
            for action in actions:
                if isinstance(action, FinishRun):
                    return action
                self._carry_out(action)
                self._status.write_at_once()
            self._status.write_when_due()
            self._clock.sleep(_POLL_INTERVAL_S)

    def _start_joined(self) -> None:
        """Start servers and environment workers on nodes that came while the run goes on."""
        for spec in self._attempts.plan_joined():
            self._start(spec)
        self._name_servers()

    def _update(self) -> None:
        """Update the observer. Log each role that was found stuck, and give its processes time to write their stacks."""
        for role in self._observer.update():
            self._status.warn_stuck(role)
            role.child.show_stacks(report.pid for report in role.reports.readable)
            self._clock.sleep(STACKS_WITHIN_S)

    def _carry_out(self, action: RecoveryAction) -> None:
        roles = self._observer.roles
        match action:
            case StopRoles():
                for name in action.roles:
                    roles[name].child.signal_group(signal.SIGKILL if action.by_kill else signal.SIGTERM)
            case AnnounceRestart():
                self._status.announce_restart(action, role=roles[action.role], last_step=self._observer.last_step())
                self._name_servers()
            case StartUnit():
                self._restart(action.unit)
            case PreemptRun():
                self._log.say(
                    f"{action.reason}: {action.grace_s:g} s to finish the step and commit it; a second signal stops now"
                )
                roles[ORCHESTRATOR].child.signal_leader(signal.SIGUSR1)
            case FinishRun():
                pass

    def _restart(self, unit: RecoveryUnit) -> None:
        """Start a unit again, whose processes have ended."""
        running = [role.child for role in self._observer.roles.values() if role.child.exit_code is None]
        self._host.end_orphans(spared=running)
        step: Step | None = None
        if unit == TRAINING:
            self._attempts.begin_next(self._log)
            step = self._attempts.from_step or Step(0)
            self._log.say(f"attempt {self._attempts.run.attempt} from {f'step {step}' if step else 'the start'}")
        self._name_servers()
        record = self._status.begin_restart(unit, from_step=step)
        self._attempts.record(Restart(roles=record.roles, cause=record.cause, from_step=record.from_step))
        specs = [spec for spec in self._attempts.planned.processes if spec.unit == unit]
        self._observer.restart(unit, names=[spec.name for spec in specs])
        for spec in specs:
            self._start(spec)

    def _name_servers(self) -> None:
        """Write the addresses of all servers for the orchestrator, without those that failed and are not restarted yet."""
        self._attempts.name_servers(without={unit for unit in self._status.units_down if not self._recovery.is_running(unit)})

    def _announce(self, end: FinishRun) -> None:
        self._status.announce_failure(end, role=self._observer.roles.get(end.role or ""))
        after_s = self._clock.now() - self._started
        self._log.say(f"{end.outcome} after {after_s:.0f} s: {end.reason}; stopping what still runs")
