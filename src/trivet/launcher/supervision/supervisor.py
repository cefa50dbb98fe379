"""Runs the roles of a run to its end: starts them, watches them, restarts what `recovery` says, and leaves nothing behind.

Consumes the roles' exits, logs and reports. Produces the exit code, status.json and Restart events. Decides nothing itself.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from trivet.config.layout import RunLayout
from trivet.config.sections.shared import RunIdentity
from trivet.config.sections.supervision import RecoveryConfig
from trivet.errors import TrivetError
from trivet.launcher import processes
from trivet.launcher.logs import RunLog, is_for_terminal, quote_log
from trivet.launcher.plan import ORCHESTRATOR, TRAINER, ProcessSpec
from trivet.launcher.supervision.interrupts import Interrupts
from trivet.launcher.supervision.readiness import ReadyProbe
from trivet.launcher.supervision.recovery import (
    UNIT_OF,
    AnnounceRestart,
    FinishRun,
    Outcome,
    PreemptRun,
    Recovery,
    RecoveryUnit,
    RecoveryVerdict,
    RunObservation,
    StartUnit,
    StopRoles,
)
from trivet.launcher.supervision.restarts import recount
from trivet.launcher.supervision.role_processes import RoleProcess, forget_reports
from trivet.launcher.supervision.stall import StallWatch, describe, pids_of, situation_of
from trivet.launcher.supervision.status import StatusFile, role_status
from trivet.launcher.supervision.watchdog import Watchdog
from trivet.launcher.terminal import finished_step, waiting_words
from trivet.lifetime import adopt_orphans
from trivet.process_table import read_processes
from trivet.stacks import STACKS_WITHIN_S
from trivet.telemetry.events import num_complete_bytes
from trivet.wire.events import Event, Restart
from trivet.wire.status import RestartRecord, RunState, RunStatus
from trivet.wire.versions import Step

TICK_S = 0.2
_REPORTS_EVERY_S = 1.0
_STATUS_EVERY_S = 2.0
_LOOKS_WITHIN_TIMEOUT = 12
"""Looks at every process of the machine within the watchdog's time: they cost, on a large machine."""
_PATIENT_S = 1.0
"""While roles stop, a signal within this time is still the one that stopped the run; a later one says: kill now."""


class AttemptSource(Protocol):
    """Where the processes of a run come from; `launcher.supervision.attempts` has the real one."""

    @property
    def layout(self) -> RunLayout: ...
    @property
    def run(self) -> RunIdentity: ...
    @property
    def from_step(self) -> Step | None: ...
    @property
    def max_steps(self) -> int | None: ...
    @property
    def last_commit(self) -> Step | None: ...
    @property
    def is_last_step_committed(self) -> bool: ...
    def specs(self) -> Sequence[ProcessSpec]: ...
    def base_urls(self) -> Sequence[str]: ...
    def teacher_urls(self) -> Sequence[str]: ...
    def go_back(self, log: RunLog) -> None: ...
    def has_completed(self, role: str) -> bool: ...
    def record(self, event: Event) -> None: ...


class Supervisor:
    """
    >>> supervisor = Supervisor(attempts, config=config.recovery, python=sys.executable, environ=os.environ, log=log, ...)
    >>> exit_code = supervisor.run()
    """

    def __init__(
        self,
        attempts: AttemptSource,
        *,
        config: RecoveryConfig,
        python: str,
        environ: Mapping[str, str],
        log: RunLog,
        shutdown_timeout_s: float,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            shutdown_timeout_s: between the request to stop and the kill.
            patience_s: how long a role may write nothing after the other has finished.
            clock: monotonic seconds; `wall`: Unix seconds, for people.
        """
        self._attempts = attempts
        self._config = config
        self._python = python
        self._environ = environ
        self._log = log
        self._shutdown_timeout_s = shutdown_timeout_s
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._recovery = Recovery(config, stop_timeout_s=shutdown_timeout_s, patience_s=patience_s)
        self._watchdog = Watchdog(timeout_s=config.watchdog_timeout_s)
        self._stalls = StallWatch(after_s=config.stall_warn_s)
        self._probes = {
            RecoveryUnit.INFERENCE: ReadyProbe(attempts.base_urls()),
            RecoveryUnit.TEACHER: ReadyProbe(attempts.teacher_urls()),
        }
        self._status = StatusFile(attempts.layout, log=log)
        self._role_processes: dict[str, RoleProcess] = {}
        self._restarts: list[RestartRecord] = []
        self._down: dict[RecoveryUnit, tuple[int, float]] = {}
        """Units that have not progressed since their restart: its place in `_restarts`, and when they failed."""
        self._last_error = ""
        self._reports_due = self._processes_due = self._status_due = 0.0
        self._started = 0.0
        self._started_at = 0.0

    def run(self) -> int:
        """Start the roles and watch them to the end; returns the exit code of the run."""
        adopt_orphans()
        self._started, self._started_at = self._clock(), self._wall()
        verdict: RecoveryVerdict | None = None
        with Interrupts(clock=self._clock) as interrupts:
            try:
                for spec in self._attempts.specs():
                    self._start(spec)
                while verdict is None:
                    verdict = self._tick(interrupts)
                    if verdict is None:
                        self._sleep(TICK_S)
                self._announce(verdict)
            finally:
                self._log.close()
                self._end_all(interrupts)
            self._conclude(verdict)
        return verdict.exit_code

    def _tick(self, interrupts: Interrupts) -> RecoveryVerdict | None:
        self._look()
        try:
            verdict = self._carry_out(interrupts)
        except TrivetError as exc:
            verdict = RecoveryVerdict(
                outcome=Outcome.FAILED, exit_code=exc.exit_code, role=None, reason=f"no restart is possible: {exc}"
            )
        if verdict is None and self._clock() >= self._status_due:
            self._status_due = self._clock() + _STATUS_EVERY_S
            self._write_status()
        return verdict

    def _look(self) -> None:
        now = self._clock()
        for role_process in self._role_processes.values():
            was_running = role_process.is_running
            lines = role_process.look(now=now, is_complete=self._attempts.has_completed)
            if was_running and not role_process.is_running:
                self._reports_due = now  # its last report says how far it came
            if role_process.child.spec.does_finish:
                for line in filter(is_for_terminal, lines):
                    self._log.show(line)
        for unit, probe in self._probes.items():
            for url in probe.look(now=now):
                self._log.say(f"{unit} ready url={url} after {now - self._started:.0f} s")
        if now < self._reports_due:
            return
        self._reports_due = now + _REPORTS_EVERY_S
        self._watchdog.notice_time(now)
        if now >= self._processes_due:
            self._processes_due = now + self._config.watchdog_timeout_s / _LOOKS_WITHIN_TIMEOUT
            table = read_processes()
            for role_process in self._role_processes.values():
                role_process.look_for_stopped(table)
        for role_process in self._role_processes.values():
            role_process.read_reports(self._attempts.layout)
            self._watch(role_process, now=now)
        self._watch_for_stalls(now=now)
        for unit in [unit for unit in self._down if self._is_back(unit)]:
            place, failed_at = self._down.pop(unit)
            self._restarts[place] = msgspec.structs.replace(self._restarts[place], down_s=now - failed_at)

    def _watch(self, role_process: RoleProcess, *, now: float) -> None:
        before = role_process.stuck
        role_process.watch(self._watchdog, now=now)
        if role_process.stuck and not before:
            child = role_process.child
            self._last_error = f"{role_process.name} stuck: {role_process.stuck}"
            self._log.say(
                f"WARNING {self._last_error}; {quote_log(child.spec.log, offset=child.log_offset)}\n"
                f"(recovery.watchdog_timeout_s = {self._config.watchdog_timeout_s:g}, "
                f'recovery.on_stuck = "{self._config.on_stuck}")'
            )
            processes.show_stacks(report.pid for report in role_process.reports.said)
            self._sleep(STACKS_WITHIN_S)
        elif before and not role_process.stuck:
            self._log.say(f"{role_process.name} reports again")

    def _watch_for_stalls(self, *, now: float) -> None:
        reports = [
            report
            for role_process in self._role_processes.values()
            if role_process.is_running
            for report in role_process.reports.said
        ]
        still_s = self._stalls.look(situation_of(reports), now=now)
        if still_s is None:
            return
        if self._stalls.is_first:  # what is written often would pass for a sign of life
            processes.show_stacks(pids_of(reports))
        self._log.say(
            f"WARNING nothing has moved for {still_s:.0f} s: {describe(reports)}\n"
            f"(recovery.stall_warn_s = {self._config.stall_warn_s:g}; where each process is stands in its log, under "
            f"{self._attempts.layout.logs})"
        )

    def _carry_out(self, interrupts: Interrupts) -> RecoveryVerdict | None:
        for action in self._recovery.decide(self._seen(interrupts)):
            match action:
                case FinishRun():
                    return action.verdict
                case StopRoles():
                    for name in action.roles:
                        self._role_processes[name].child.signal_group(signal.SIGKILL if action.by_kill else signal.SIGTERM)
                case AnnounceRestart():
                    self._say_failure(action)
                case StartUnit():
                    self._start_again(action.unit)
                case PreemptRun():
                    self._log.say(f"SIGTERM: {action.grace_s:g} s to finish the step and commit it; a second signal stops now")
                    self._role_processes[ORCHESTRATOR].child.signal_leader(signal.SIGUSR1)
            self._status_due = 0.0
        return None

    def _seen(self, interrupts: Interrupts) -> RunObservation:
        roles = {
            name: role_process.observe(has_progressed=self._has_progressed(UNIT_OF[name]))
            for name, role_process in self._role_processes.items()
        }
        has_trouble = any(role.exit_code is not None or role.stuck for role in roles.values())
        return RunObservation(
            now=self._clock(),
            roles=roles,
            interrupted_by=interrupts.first,
            is_hurried=interrupts.is_hurried,
            is_last_step_committed=has_trouble and self._attempts.is_last_step_committed,
        )

    def _has_progressed(self, unit: RecoveryUnit) -> bool:
        """Since the unit was started: a step was finished, or the servers have answered."""
        if unit in self._probes:
            return self._probes[unit].are_all_ready
        return self._last_step() > (self._attempts.from_step or 0)

    def _is_back(self, unit: RecoveryUnit) -> bool:
        return self._recovery.is_running(unit) and self._has_progressed(unit)

    def _last_step(self) -> int:
        trainer = self._role_processes.get(TRAINER)
        return trainer.last_step(attempt=self._attempts.run.attempt) if trainer is not None else 0

    def _start(self, spec: ProcessSpec) -> None:
        forget_reports(self._attempts.layout, spec.name, count=spec.num_reports)
        now = self._clock()
        child = processes.start(spec, python=self._python, environ=self._environ)
        self._role_processes[spec.name] = RoleProcess(child, now=now)
        self._watchdog.begin(spec.name, now=now)
        self._log.say(f"started {spec.name} pid={child.pid} log={spec.log}")

    def _say_failure(self, action: AnnounceRestart) -> None:
        role_process = self._role_processes[action.role]
        is_training = action.unit is RecoveryUnit.TRAINING
        self._last_error = action.cause
        if not role_process.stuck:  # else the watchdog has quoted its log
            self._last_error += f"; {quote_log(role_process.child.spec.log, offset=role_process.child.log_offset)}"
            self._log.say(f"WARNING {self._last_error}")
        with_it = "; orchestrator and trainer go back to the last checkpoint" if is_training else ""
        self._log.say(f"{action.cause}{with_it}, restart in {action.delay_s:g} s")
        self._down.pop(action.unit, None)
        self._restarts.append(
            RestartRecord(
                time=self._wall(),
                roles=[name for name, unit in UNIT_OF.items() if unit is action.unit],
                cause=action.cause,
                lost_steps=self._last_step() if is_training else 0,
            )
        )
        self._down[action.unit] = (len(self._restarts) - 1, self._clock())

    def _start_again(self, unit: RecoveryUnit) -> None:
        """Restart a unit whose processes have ended."""
        alive = [
            role_process.child.pid for role_process in self._role_processes.values() if role_process.child.exit_code is None
        ]
        processes.end_orphans(spared=alive)
        place, _ = self._down[unit]
        if unit is RecoveryUnit.TRAINING:
            self._attempts.go_back(self._log)
            step = self._attempts.from_step or Step(0)
            lost = max(0, self._restarts[place].lost_steps - step)
            self._restarts[place] = msgspec.structs.replace(self._restarts[place], from_step=step, lost_steps=lost)
            self._log.say(f"attempt {self._attempts.run.attempt} from {f'step {step}' if step else 'the start'}")
        else:
            self._probes[unit].again()
        record = self._restarts[place]
        self._attempts.record(Restart(roles=record.roles, cause=record.cause, from_step=record.from_step))
        for spec in self._attempts.specs():
            if UNIT_OF[spec.name] is unit:
                self._start(spec)

    def _announce(self, verdict: RecoveryVerdict) -> None:
        role_process = self._role_processes.get(verdict.role or "")
        if verdict.outcome is Outcome.FAILED:
            self._last_error = f"{verdict.role or 'run'} failed: {verdict.reason}"
            if role_process is not None:
                self._last_error += f"\n{quote_log(role_process.child.spec.log, offset=role_process.child.log_offset)}"
            self._log.say(self._last_error)
        self._log.say(
            f"{verdict.outcome} after {self._clock() - self._started:.0f} s: {verdict.reason}; stopping what still runs"
        )

    def _end_all(self, interrupts: Interrupts) -> None:
        patient_until = self._clock() + _PATIENT_S
        killed = processes.stop(
            [role_process.child for role_process in self._role_processes.values()],
            timeout_s=self._shutdown_timeout_s,
            is_hurried=lambda: interrupts.has_any_since(patient_until),
        )
        processes.end_orphans()
        for child in killed:
            self._log.say(f"{child.spec.name} did not end within {self._shutdown_timeout_s:g} s of SIGTERM and was killed")

    def _conclude(self, verdict: RecoveryVerdict) -> None:
        """What happened in order, and how to go on; for people and for status.json."""
        for line in recount(self._restarts):
            self._log.say(line)
        last = self._attempts.last_commit
        if verdict.outcome is not Outcome.DONE and last is not None and not self._attempts.is_last_step_committed:
            self._log.say(f"committed up to step {last}; go on from there with --ckpt.resume-step -1")
        self._write_status(verdict)

    def _write_status(self, verdict: RecoveryVerdict | None = None) -> None:
        running = RunState.PREEMPTED if self._recovery.is_preempted else RunState.RUNNING
        status = RunStatus(
            run_id=self._attempts.run.id,
            attempt=self._attempts.run.attempt,
            pid=os.getpid(),
            state=running if verdict is None else RunState(verdict.outcome.value),
            started=self._started_at,
            time=self._wall(),
            max_steps=self._attempts.max_steps,
            last_commit=self._attempts.last_commit,
            roles=[
                role_status(role_process, phase=self._recovery.phase_of(name))
                for name, role_process in self._role_processes.items()
            ],
            restarts=list(self._restarts),
            last_error=self._last_error,
            exit_code=verdict.exit_code if verdict is not None else None,
            reason=verdict.reason if verdict is not None else "",
            events_bytes=num_complete_bytes(self._attempts.layout.events),
        )
        self._status.write(status)
        if verdict is None:
            self._log.show_progress(step=finished_step(status), max_steps=status.max_steps, doing=waiting_words(status))
