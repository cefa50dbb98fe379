"""Defines what recovery decides from, the state of a run at one moment, and the actions that it decides on. Values alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trivet.launcher.plan import RecoveryUnit


class Outcome(StrEnum):
    """The way in which a run ended."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryVerdict:
    """The end of a run: how, and why."""

    outcome: Outcome
    exit_code: int
    role: str | None
    """The role whose failure ended the run."""
    reason: str


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

    verdict: RecoveryVerdict


RecoveryAction = StopRoles | AnnounceRestart | StartUnit | PreemptRun | FinishRun
