"""Defines what recovery decides from, the state of a run at one moment, and the actions that it decides on. Values alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trivet.exits import describe_exit
from trivet.launcher.plan import RecoveryUnit
from trivet.wire.status import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleObservation:
    """The state of a role at one moment, since it was started last. Times are of one monotonic clock."""

    name: str
    unit: RecoveryUnit
    does_finish: bool
    node: int = 0
    work: str = ""
    """As `ProcessSpec.work`."""
    exit_code: int | None = None
    ended_at: float = 0.0
    is_complete: bool = False
    """True when it recorded that it reached the last step."""
    last_output_at: float = 0.0
    has_progressed: bool = False
    """True when a step was finished since the start of its unit, or its servers have answered."""
    starts_after: tuple[str, ...] = ()
    """The servers on its GPUs that must answer before it is started."""
    is_waiting: bool = False
    """True when it waits for another role: it takes no more memory of its GPUs, and frees none."""
    stuck: str = ""
    """The reason why the watchdog treats it as stuck; empty when it does not."""
    last_log_line: str = ""
    """The last line of the log of a role that ended, without numbers: it tells one error from another."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRoles:
    """End these roles, by SIGTERM or by SIGKILL."""

    roles: tuple[str, ...]
    by_kill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRestart:
    """Say that a unit failed and will be restarted after `delay_s`."""

    unit: RecoveryUnit
    roles: tuple[str, ...]
    """The roles of the unit."""
    role: str
    """The role that failed first."""
    cause: str
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUnit:
    """Start a unit again; what it left has ended."""

    unit: RecoveryUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptRun:
    """Have the roles finish the step, commit a checkpoint and end."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRun:
    """End the run: stop what still runs."""

    outcome: RunState
    """Done, failed or interrupted."""
    exit_code: int
    reason: str
    role: str | None = None
    """The role whose failure ended the run."""


RecoveryAction = StopRoles | AnnounceRestart | StartUnit | PreemptRun | FinishRun
