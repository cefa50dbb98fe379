"""Runs the roles of a run to its end: starts them, watches them, restarts what `recovery` says, and leaves nothing behind.

One round of the loop, every `_POLL_INTERVAL_S`:

    exits, log lines --------> RoleProcess --------+
    reports, /proc ----------> RoleHealthMonitor --+
    servers, finished steps -> UnitProgress -------+--> RunObservation --> Recovery.decide (pure) --+
    SIGINT, SIGTERM, SIGHUP -> Interrupts ---------+                                                | actions
                                                                                                    v
    role processes <--start, signal-- ProcessHost <----+-------------------------------- Supervisor._carry_out
    rl.log, events.jsonl <----------- RestartLog <-----+
    status.json, terminal <---------- StatusReporter <-+

Consumes the roles' exits, logs and reports. Produces the exit code of the run, status.json and Restart events.
Waits for the clock alone: every input is polled, and a server that is asked has a second to answer.
Unblocked by the clock. The loop ends with the verdict of `Recovery`, and decides nothing itself.
"""

import signal
from collections.abc import Iterable

from trivet.config.schema.deployment import RecoveryConfig
from trivet.environments.packages.probe import EnvironmentProbe
from trivet.errors import EnvironmentLoadError, NodesMissing, RunDirectoryBusy, TrivetError
from trivet.key_names import key_name
from trivet.launcher.host import ProcessHost
from trivet.launcher.logs import RunLog, is_for_terminal
from trivet.launcher.plan import ORCHESTRATOR, TRAINING, ProcessSpec, RecoveryUnit
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.decisions import (
    AnnounceRestart,
    FinishRun,
    Outcome,
    PreemptRun,
    RecoveryAction,
    RecoveryVerdict,
    RunObservation,
    StartUnit,
    StopRoles,
)
from trivet.launcher.supervision.health import RoleHealthMonitor
from trivet.launcher.supervision.recovery import Recovery
from trivet.launcher.supervision.restarts import RestartLog, summarize_restarts
from trivet.launcher.supervision.role_processes import SYSTEM_CLOCK, Clock, RoleProcess, UnitProgress
from trivet.launcher.supervision.status import StatusReporter
from trivet.process.signals import Interrupts
from trivet.wire.events import Restart
from trivet.wire.versions import Step

_POLL_INTERVAL_S = 0.2
_REPEATED_SIGNAL_S = 1.0
"""While roles stop, a signal within this time is still the one that stopped the run; a later one says: kill now."""


class Supervisor:
    """Runs one run."""

    def __init__(
        self,
        attempts: Attempts,
        *,
        environments: EnvironmentProbe,
        host: ProcessHost,
        config: RecoveryConfig,
        recovery: Recovery,
        log: RunLog,
        shutdown_timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare the parts; nothing is started.

        Args:
            environments: the environments of the run, which are being loaded to find what is wrong with them.
            shutdown_timeout_s: between the request to stop and the kill.
        """
        self._attempts = attempts
        self._environments = environments
        self._host = host
        self._log = log
        self._clock = clock
        self._shutdown_timeout_s = shutdown_timeout_s
        self._started = clock.now()
        self._roles: dict[str, RoleProcess] = {}
        """The newest process of each role, by the role's name."""
        self._load_error: EnvironmentLoadError | None = None
        self._is_superseded = False
        """True when another node leads the run: the status is its own."""
        self._must_not_lead = False
        """True when another node leads the run, or may soon: the processes end before anything else is done."""
        self._recovery = recovery
        self._restarts = RestartLog(log=log, clock=clock)
        self._progress = UnitProgress(attempts, self._roles)
        self._health = RoleHealthMonitor(
            config, layout=attempts.layout, host=host, restarts=self._restarts, log=log, clock=clock
        )
        self._status = StatusReporter(
            attempts, roles=self._roles, recovery=self._recovery, restarts=self._restarts, log=log, clock=clock
        )

    def run(self) -> int:
        """Start the roles and watch them to the end; returns the exit code of the run.

        Raises:
            EnvironmentLoadError: an environment cannot be loaded. The roles that had been started have ended.
        """
        self._host.adopt_orphans()
        with Interrupts(clock=self._clock.now) as interrupts:
            try:
                verdict = self._supervise(interrupts)
                if not self._must_not_lead:
                    self._announce(verdict)
            finally:
                if not self._must_not_lead:
                    self._log.close()
                self._stop_all(interrupts)
            if self._must_not_lead:  # written only now: the log may be in a directory that does not answer
                self._log.close()
                self._announce(verdict)
            self._conclude(verdict)
        if self._load_error is not None:
            raise self._load_error
        return verdict.exit_code

    def _supervise(self, interrupts: Interrupts) -> RecoveryVerdict:
        try:
            self._start_all(interrupts)
        except EnvironmentLoadError as exc:
            self._load_error = exc
            reason = "an environment cannot be loaded"
            return RecoveryVerdict(outcome=Outcome.FAILED, exit_code=exc.exit_code, role=None, reason=reason)
        return self._watch(interrupts)

    def _start_all(self, interrupts: Interrupts) -> None:
        """Start the roles at once, except those that `_may_start` keeps waiting. When a role ends or a signal comes, start these
        too: what follows is for `_watch`, which handles whole runs alone.
        """
        waiting = list(self._attempts.specs())
        while True:
            self._host.lost_nodes()  # raises when another node leads the run
            self._look()
            has_trouble = interrupts.first is not None or not all(role.is_running for role in self._roles.values())
            while ready := next((spec for spec in waiting if has_trouble or self._may_start(spec)), None):
                waiting.remove(ready)
                self._start([ready])
            if not waiting:
                return
            self._status.write_when_due()
            self._clock.sleep(_POLL_INTERVAL_S)

    def _may_start(self, spec: ProcessSpec) -> bool:
        """Return whether the servers answer that must have their memory first, and the orchestrator can load the environments."""
        if spec.name == ORCHESTRATOR:
            if not self._environments.is_over:
                return False  # it would load the same, and report the same error
            self._environments.wait()
        answering = {name for name, role in self._roles.items() if self._progress.is_answering(role.child.spec.unit)}
        return answering.issuperset(spec.starts_after)

    def _look(self) -> None:
        self._poll_roles()
        self._poll_servers()
        self._check_health()

    def _watch(self, interrupts: Interrupts) -> RecoveryVerdict:
        while True:
            self._look()
            verdict = self._act(interrupts)
            if verdict is not None:
                return verdict
            self._status.write_when_due()
            self._clock.sleep(_POLL_INTERVAL_S)

    def _start(self, specs: Iterable[ProcessSpec]) -> None:
        for spec in specs:
            child = self._host.start(spec)
            self._roles[spec.name] = RoleProcess(child, now=self._clock.now())
            self._health.begin(spec.name)
            where = f"on node {spec.node}" if spec.node else f"pid={child.pid}"
            self._log.say(f"started {spec.name} {where} log={spec.log}")

    def _poll_roles(self) -> None:
        for role in self._roles.values():
            was_running = role.is_running
            lines = role.poll(now=self._clock.now(), is_complete=self._attempts.has_completed)
            if was_running and not role.is_running:
                self._health.check_at_once()
            if role.child.spec.does_finish:
                for line in filter(is_for_terminal, lines):
                    self._log.show(line)

    def _poll_servers(self) -> None:
        now = self._clock.now()
        for unit, url in self._progress.poll(now=now):
            self._log.say(f"{unit} ready url={url} after {now - self._started:.0f} s")

    def _check_health(self) -> None:
        if not self._health.check(self._roles.values()):
            return
        for unit in self._restarts.units_down:
            if self._recovery.is_running(unit) and self._progress.has_progressed(unit):
                self._restarts.end(unit)

    def _act(self, interrupts: Interrupts) -> RecoveryVerdict | None:
        try:
            actions = self._recovery.decide(self._observe(interrupts))
            servers = {action.unit for action in actions if isinstance(action, StartUnit) and action.unit != TRAINING}
            if servers and self._host.has_nodes:
                self._attempts.plan_again(servers)
            for action in actions:
                if isinstance(action, FinishRun):
                    return action.verdict
                self._carry_out(action)
                self._status.write_at_once()
        except RunDirectoryBusy as exc:
            self._is_superseded = self._must_not_lead = True
            return RecoveryVerdict(outcome=Outcome.FAILED, exit_code=exc.exit_code, role=None, reason=str(exc))
        except NodesMissing as exc:
            self._must_not_lead = True
            return RecoveryVerdict(outcome=Outcome.FAILED, exit_code=exc.exit_code, role=None, reason=str(exc))
        except TrivetError as exc:
            reason = f"no restart is possible: {exc}"
            return RecoveryVerdict(outcome=Outcome.FAILED, exit_code=exc.exit_code, role=None, reason=reason)
        return None

    def _observe(self, interrupts: Interrupts) -> RunObservation:
        roles = {
            name: role.observe(has_progressed=self._progress.has_progressed(role.child.spec.unit))
            for name, role in self._roles.items()
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

    def _carry_out(self, action: RecoveryAction) -> None:
        match action:
            case StopRoles():
                for name in action.roles:
                    self._roles[name].child.signal_group(signal.SIGKILL if action.by_kill else signal.SIGTERM)
            case AnnounceRestart():
                self._restarts.announce(action, role=self._roles[action.role], last_step=self._progress.last_step())
                self._name_servers()
            case StartUnit():
                self._restart(action.unit)
            case PreemptRun():
                self._log.say(
                    f"{action.reason}: {action.grace_s:g} s to finish the step and commit it; a second signal stops now"
                )
                self._roles[ORCHESTRATOR].child.signal_leader(signal.SIGUSR1)
            case FinishRun():
                pass

    def _restart(self, unit: RecoveryUnit) -> None:
        """Start a unit again whose processes have ended."""
        self._host.end_orphans(spared=[role.child for role in self._roles.values() if role.child.exit_code is None])
        step: Step | None = None
        if unit == TRAINING:
            self._attempts.begin_next(self._log)
            step = self._attempts.from_step or Step(0)
            self._log.say(f"attempt {self._attempts.run.attempt} from {f'step {step}' if step else 'the start'}")
        self._name_servers()
        self._progress.restart(unit)
        record = self._restarts.begin(unit, from_step=step)
        self._attempts.record(Restart(roles=record.roles, cause=record.cause, from_step=record.from_step))
        specs = [spec for spec in self._attempts.specs() if spec.unit == unit]
        for name in {name for name, role in self._roles.items() if role.child.spec.unit == unit} - {
            spec.name for spec in specs
        }:
            del self._roles[name]  # the attempt has fewer nodes
        self._start(specs)

    def _name_servers(self) -> None:
        """Tell the orchestrator of the servers that have not failed, or are being started again."""
        self._attempts.name_servers(without={unit for unit in self._restarts.units_down if not self._recovery.is_running(unit)})

    def _announce(self, verdict: RecoveryVerdict) -> None:
        self._restarts.fail(verdict, role=self._roles.get(verdict.role or ""))
        self._log.say(
            f"{verdict.outcome} after {self._clock.now() - self._started:.0f} s: {verdict.reason}; stopping what still runs"
        )

    def _stop_all(self, interrupts: Interrupts) -> None:
        patient_until = self._clock.now() + _REPEATED_SIGNAL_S
        killed = self._host.stop(
            [role.child for role in self._roles.values()],
            timeout_s=self._shutdown_timeout_s,
            is_hurried=lambda: interrupts.has_any_since(patient_until),
        )
        self._host.end_orphans()
        for child in killed:
            self._log.say(f"{child.spec.name} did not end within {self._shutdown_timeout_s:g} s of SIGTERM and was killed")

    def _conclude(self, verdict: RecoveryVerdict) -> None:
        """Say what happened in order and how to go on, and write the last status."""
        for line in summarize_restarts(self._restarts.records):
            self._log.say(line)
        last = self._attempts.last_commit
        if verdict.outcome is not Outcome.DONE and last is not None and not self._attempts.is_last_step_committed:
            self._log.say(f"committed up to step {last}; go on from there with {key_name('--ckpt.resume-step -1')}")
        if not self._is_superseded:
            self._status.write(verdict)
