"""Records the failures and restarts of a run, and says them to the user as they happen and once more at the end."""

import time
from collections.abc import Iterator, Sequence

import msgspec

from trivet.exits import describe_restart
from trivet.launcher.logs import RunLog, quote_log
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.supervision.decisions import AnnounceRestart, Outcome, RecoveryVerdict
from trivet.launcher.supervision.role_processes import Clock, RoleProcess
from trivet.wire.status import RestartRecord
from trivet.wire.versions import Step


class RestartLog:
    """The restarts of a run, the units that have not progressed since theirs, and the newest error."""

    def __init__(self, *, log: RunLog, clock: Clock) -> None:
        self.records: list[RestartRecord] = []
        self.last_error = ""
        self._log = log
        self._clock = clock
        self._down: dict[RecoveryUnit, tuple[int, float]] = {}
        """The index of its record and the time of its failure, for each unit without progress since."""

    @property
    def units_down(self) -> tuple[RecoveryUnit, ...]:
        """Units that failed and have not progressed since."""
        return tuple(self._down)

    def warn_stuck(self, role: RoleProcess, *, hint: str) -> None:
        """Say that the watchdog found `role` stuck.

        Args:
            hint: the settings that made it so.
        """
        self.last_error = f"{role.name} stuck: {role.stuck}"
        self._log.say(f"WARNING {self.last_error}; {_quote(role)}\n{hint}")

    def announce(self, action: AnnounceRestart, *, role: RoleProcess, last_step: int) -> None:
        """Say that `role` failed and that its unit will be restarted.

        Args:
            last_step: the last step that the trainer finished.
        """
        is_training = action.unit == TRAINING
        self.last_error = action.cause
        if not role.stuck:  # else `warn_stuck` has quoted its log
            self.last_error += f"; {_quote(role)}"
            self._log.say(f"WARNING {self.last_error}")
        rollback = "; orchestrator and trainer go back to the last checkpoint" if is_training else ""
        self._log.say(f"{action.cause}{rollback}, restart in {action.delay_s:g} s")
        self._down[action.unit] = (len(self.records), self._clock.now())
        self.records.append(
            RestartRecord(
                time=self._clock.unix_time(),
                roles=list(action.roles),
                cause=action.cause,
                lost_steps=last_step if is_training else 0,
            )
        )

    def begin(self, unit: RecoveryUnit, *, from_step: Step | None) -> RestartRecord:
        """Note that `unit` starts again, and return its record.

        Args:
            from_step: where trainer and orchestrator go on from; None for servers, which have no step.
        """
        index, _ = self._down[unit]
        record = self.records[index]
        if from_step is not None:
            lost_steps = max(0, record.lost_steps - from_step)
            self.records[index] = msgspec.structs.replace(record, from_step=from_step, lost_steps=lost_steps)
        return self.records[index]

    def end(self, unit: RecoveryUnit) -> None:
        """Note that `unit` has progressed again."""
        index, failed_at = self._down.pop(unit)
        self.records[index] = msgspec.structs.replace(self.records[index], down_s=self._clock.now() - failed_at)

    def fail(self, verdict: RecoveryVerdict, *, role: RoleProcess | None) -> None:
        """Say why the run failed, with the log of `role`; nothing when it did not fail."""
        if verdict.outcome is not Outcome.FAILED:
            return
        self.last_error = f"{verdict.role or 'run'} failed: {verdict.reason}"
        if role is not None:
            self.last_error += f"\n{_quote(role)}"
        self._log.say(self.last_error)


def summarize_restarts(records: Sequence[RestartRecord]) -> Iterator[str]:
    """Yield the restarts of a run in the order they happened, and what they cost; nothing when there were none."""
    if not records:
        return
    lost_s = sum(record.down_s or 0.0 for record in records)
    steps = sum(record.lost_steps for record in records)
    yield f"restarts: {len(records)}, {lost_s:.0f} s without progress, {steps} steps taken again"
    for record in records:
        yield f"  {time.strftime('%H:%M:%S', time.localtime(record.time))} {describe_restart(record)}"


def _quote(role: RoleProcess) -> str:
    return quote_log(role.child.spec.log, offset=role.child.log_offset)
