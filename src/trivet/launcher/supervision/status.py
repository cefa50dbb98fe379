"""Writes status.json: who waits for whom, since when, and how the run ended. Moves the bar of the terminal with it."""

import os
from collections.abc import Mapping

import msgspec

from trivet.config.layout import RunLayout
from trivet.exits import describe_exit
from trivet.launcher.logs import RunLog
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.decisions import RecoveryVerdict
from trivet.launcher.supervision.recovery import Phase, Recovery
from trivet.launcher.supervision.restarts import RestartLog
from trivet.launcher.supervision.role_processes import Clock, RoleProcess
from trivet.launcher.terminal import describe_activity, finished_step
from trivet.storage.durable import replace_file
from trivet.telemetry.events import num_complete_bytes
from trivet.wire.status import RoleState, RoleStatus, RunState, RunStatus

_WRITE_INTERVAL_S = 2.0
"""Whoever reads the file treats one that is much older as the file of a launcher that was killed."""
_STATES = {Phase.STOPPING: RoleState.STOPPING, Phase.BACKING_OFF: RoleState.BACKING_OFF}


class StatusReporter:
    """Says every two seconds, and after each action of the supervisor, how the run stands."""

    def __init__(
        self,
        attempts: Attempts,
        *,
        roles: Mapping[str, RoleProcess],
        recovery: Recovery,
        restarts: RestartLog,
        log: RunLog,
        clock: Clock,
    ) -> None:
        self._attempts = attempts
        self._roles = roles
        self._recovery = recovery
        self._restarts = restarts
        self._log = log
        self._clock = clock
        self._file = StatusFile(attempts.layout, log=log)
        self._started = clock.unix_time()
        self._due = 0.0

    def write_at_once(self) -> None:
        """Have the next `write_when_due` write: something was done."""
        self._due = 0.0

    def write_when_due(self) -> None:
        """Write the status of a run that goes on."""
        if self._clock.now() < self._due:
            return
        self._due = self._clock.now() + _WRITE_INTERVAL_S
        status = self.write()
        self._log.show_progress(step=finished_step(status), max_steps=status.max_steps, doing=describe_activity(status))

    def write(self, verdict: RecoveryVerdict | None = None) -> RunStatus:
        """Write the status and return it; with a verdict it is the last one of the run."""
        running = RunState.PREEMPTED if self._recovery.is_preempted else RunState.RUNNING
        status = RunStatus(
            run_id=self._attempts.run.id,
            attempt=self._attempts.run.attempt,
            pid=os.getpid(),
            node=os.uname().nodename,
            state=running if verdict is None else RunState(verdict.outcome.value),
            started=self._started,
            time=self._clock.unix_time(),
            max_steps=self._attempts.max_steps,
            last_commit=self._attempts.last_commit,
            roles=[role_status(role, phase=self._recovery.phase_of(role.child.spec.unit)) for role in self._roles.values()],
            restarts=list(self._restarts.records),
            last_error=self._restarts.last_error,
            exit_code=verdict.exit_code if verdict is not None else None,
            reason=verdict.reason if verdict is not None else "",
            events_bytes=num_complete_bytes(self._attempts.layout.events),
        )
        self._file.write(status)
        return status


class StatusFile:
    """The file status.json. A run does not end because it cannot be written."""

    def __init__(self, layout: RunLayout, *, log: RunLog) -> None:
        self._layout = layout
        self._log = log
        self._has_failed = False

    def write(self, status: RunStatus) -> None:
        """Replace the file; a failure is said once, until writing works again."""
        try:
            replace_file(self._layout.status, msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n")
        except OSError as exc:
            if not self._has_failed:
                self._log.say(f"{self._layout.status} cannot be written ({exc.strerror}); the run goes on")
            self._has_failed = True
        else:
            self._has_failed = False


def role_status(role: RoleProcess, *, phase: Phase) -> RoleStatus:
    """Return the part of status.json about one role."""
    code, reports = role.child.exit_code, list(role.reports.readable)
    if code is not None:  # environment workers end with the process that reported them as alive
        reports = [msgspec.structs.replace(report, workers=[]) for report in reports]
    state = RoleState.ENDED if code is not None else RoleState.RUNNING
    return RoleStatus(
        name=role.name,
        state=_STATES.get(phase, state),
        pid=role.child.pid,
        node=role.child.spec.node,
        exit=describe_exit(code) if code is not None else "",
        stuck=role.stuck,
        reports=reports,
    )
