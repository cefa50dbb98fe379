"""Reports the state of a run to the user: logs failures and restarts as they happen, and writes the observed state to status.json.

The supervisor writes status.json every two seconds and after each action, and updates the progress bar of the terminal with it.
"""

import os
import time

import msgspec

from trivet.exits import describe_exit, describe_restart
from trivet.launcher.forecast import FIRST_STEPS, compare_with_facts, forecast_run, read_facts
from trivet.launcher.logs import RunLog, describe_activity, finished_step, quote_log
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.processes import Clock
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.observer import Observer, RoleProcess
from trivet.launcher.supervision.recovery import AnnounceRestart, FinishRun, Recovery
from trivet.machine import inspect_machine
from trivet.storage.durable import replace_file
from trivet.telemetry.events import num_complete_bytes
from trivet.wire.status import RestartRecord, RoleState, RoleStatus, RunState, RunStatus
from trivet.wire.versions import Step

_WRITE_INTERVAL_S = 2.0
"""Seconds between two writes of status.json. Readers treat a file that is much older as that of a launcher that was killed."""


class StatusReporter:
    """Logs failures and restarts, keeps their records, and writes status.json. If the file cannot be written, the run continues."""

    def __init__(self, attempts: Attempts, *, observer: Observer, recovery: Recovery, log: RunLog, clock: Clock) -> None:
        self.last_error = ""
        """The last failure, with the end of the role's log; empty when there was none."""
        self.restarts: list[RestartRecord] = []
        self._attempts = attempts
        self._observer = observer
        self._recovery = recovery
        self._log = log
        self._clock = clock
        self._down: dict[RecoveryUnit, tuple[int, float]] = {}
        """The units that failed and have not progressed since: the index in `restarts` and the time of the failure."""
        self._started = clock.unix_time()
        self._write_due = 0.0
        self._has_write_failed = False
        self._forecast = forecast_run(attempts.config, inspect_machine())
        """The forecast that is still to be compared with the run's first steps; None afterwards, and without one."""

    @property
    def units_down(self) -> tuple[RecoveryUnit, ...]:
        """Units that failed and have not progressed since."""
        return tuple(self._down)

    def warn_stuck(self, role: RoleProcess) -> None:
        """Log that the watchdog found `role` stuck, and the settings on which this depends."""
        config, self.last_error = self._attempts.config.recovery, f"{role.name} stuck: {role.stuck}"
        hint = f'(recovery.watchdog_timeout_s = {config.watchdog_timeout_s:g}, recovery.on_stuck = "{config.on_stuck}")'
        self._log.say(f"WARNING {self.last_error}; {_quote(role)}\n{hint}")

    def announce_restart(self, action: AnnounceRestart, *, role: RoleProcess, last_step: int) -> None:
        """Log that `role` failed and that its unit will be restarted, and add the record of the restart.

        Args:
            last_step: the last step that the trainer finished.
        """
        is_training = action.unit == TRAINING
        self.last_error = action.cause
        if not role.stuck:  # for a stuck role `warn_stuck` has quoted the log already
            self.last_error += f"; {_quote(role)}"
            self._log.say(f"WARNING {self.last_error}")
        rollback = "; orchestrator and trainer go back to the last checkpoint" if is_training else ""
        self._log.say(f"{action.cause}{rollback}, restart in {action.delay_s:g} s")
        self._down[action.unit] = (len(self.restarts), self._clock.now())
        self.restarts.append(
            RestartRecord(
                time=self._clock.unix_time(),
                roles=list(action.roles),
                cause=action.cause,
                lost_steps=last_step if is_training else 0,
            )
        )

    def begin_restart(self, unit: RecoveryUnit, *, from_step: Step | None) -> RestartRecord:
        """Complete the record of a restart, now that `unit` starts again, and return it.

        Args:
            from_step: the step from which trainer and orchestrator continue; None for servers, which have no step.
        """
        index, _ = self._down[unit]
        if from_step is not None:
            lost_steps = max(0, self.restarts[index].lost_steps - from_step)
            self.restarts[index] = msgspec.structs.replace(self.restarts[index], from_step=from_step, lost_steps=lost_steps)
        return self.restarts[index]

    def end_restart(self, unit: RecoveryUnit) -> None:
        """Record that `unit` has progressed again, and for how long it had not."""
        index, failed_at = self._down.pop(unit)
        self.restarts[index] = msgspec.structs.replace(self.restarts[index], down_s=self._clock.now() - failed_at)

    def announce_failure(self, end: FinishRun, *, role: RoleProcess | None) -> None:
        """Log why the run failed, with the end of the log of `role`. Log nothing when it did not fail."""
        if end.outcome is RunState.FAILED:
            self.last_error = f"{end.role or 'run'} failed: {end.reason}" + (f"\n{_quote(role)}" if role is not None else "")
            self._log.say(self.last_error)

    def summarize_restarts(self) -> None:
        """Log all restarts once more, in their order, and what they cost. Log nothing when there were none."""
        if self.restarts:
            lost_s = sum(record.down_s or 0.0 for record in self.restarts)
            steps = sum(record.lost_steps for record in self.restarts)
            self._log.say(f"restarts: {len(self.restarts)}, {lost_s:.0f} s without progress, {steps} steps taken again")
        for record in self.restarts:
            self._log.say(f"  {time.strftime('%H:%M:%S', time.localtime(record.time))} {describe_restart(record)}")

    def write_at_once(self) -> None:
        """Make the next `write_when_due` write, because an action was carried out."""
        self._write_due = 0.0

    def write_when_due(self) -> None:
        """Write the status of a running run when it is due, and update the progress bar of the terminal."""
        if self._clock.now() >= self._write_due:
            self._write_due = self._clock.now() + _WRITE_INTERVAL_S
            status = self.write()
            self._compare_forecast(finished_step(status))
            self._log.show_progress(step=finished_step(status), max_steps=status.max_steps, activity=describe_activity(status))

    def _compare_forecast(self, step: int) -> None:
        """Say once, after the first steps, what of the forecast was off."""
        from_step = self._attempts.from_step or 0
        if self._forecast is None or step < from_step + FIRST_STEPS:
            return
        if (facts := read_facts(self._attempts.layout, from_step=from_step)) is not None:
            self._log.say(compare_with_facts(self._forecast, facts))
            self._forecast = None

    def write(self, end: FinishRun | None = None) -> RunStatus:
        """Write the status and return it. A failed write is logged once, until a write succeeds.

        Args:
            end: the end of the run, for its last status; None while it runs.
        """
        running = RunState.PREEMPTED if self._recovery.is_preempted else RunState.RUNNING
        status = RunStatus(
            run_id=self._attempts.run.id,
            attempt=self._attempts.run.attempt,
            pid=os.getpid(),
            node=os.uname().nodename,
            state=running if end is None else end.outcome,
            started=self._started,
            time=self._clock.unix_time(),
            max_steps=self._attempts.max_steps,
            last_commit=self._attempts.last_commit,
            roles=[self._role_status(role) for role in self._observer.roles.values()],
            restarts=list(self.restarts),
            last_error=self.last_error,
            exit_code=end.exit_code if end is not None else None,
            reason=end.reason if end is not None else "",
            events_bytes=num_complete_bytes(self._attempts.layout.events),
        )
        file = self._attempts.layout.status
        try:
            replace_file(file, msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n")
            self._has_write_failed = False
        except OSError as exc:
            if not self._has_write_failed:
                self._log.say(f"{file} cannot be written ({exc.strerror}); the run goes on")
            self._has_write_failed = True
        return status

    def _role_status(self, role: RoleProcess) -> RoleStatus:
        spec, code, reports = role.child.spec, role.child.exit_code, list(role.reports.readable)
        state = self._recovery.state_of(spec.unit)
        if code is not None:  # its environment workers ended with it, although its last report has them as alive
            reports = [msgspec.structs.replace(report, workers=[]) for report in reports]
            state = RoleState.ENDED if state is RoleState.RUNNING else state
        return RoleStatus(
            name=role.name,
            state=state,
            pid=role.child.pid,
            node=spec.node,
            exit=describe_exit(code) if code is not None else "",
            stuck=role.stuck,
            reports=reports,
        )


def _quote(role: RoleProcess) -> str:
    """Return the end of the role's log, as text for a message."""
    return quote_log(role.child.spec.log, offset=role.child.log_offset)
