"""Gives recovery histories of exits, signals and reports, and asks for its decisions."""

from dataclasses import replace

from trivet.config.schema.deployment import DeploymentConfig, RecoveryConfig
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.supervision.decisions import (
    AnnounceRestart,
    FinishRun,
    RecoveryAction,
    RoleObservation,
    RunObservation,
    StartUnit,
)
from trivet.launcher.supervision.recovery import MAX_BACKOFF_S, Recovery

PATIENCE_S = 60.0
INFERENCE, TEACHER = RecoveryUnit("inference"), RecoveryUnit("teacher")
STOP_S = 20.0
SIGINT, SIGTERM = 2, 15


class History:
    """A run as events at times of a fake clock. Every role has progressed unless the test says otherwise."""

    def __init__(self, *, deployment: DeploymentConfig | None = None, **recovery: object) -> None:
        self.recovery = Recovery(
            RecoveryConfig.model_validate(recovery),
            stop_timeout_s=STOP_S,
            patience_s=PATIENCE_S,
            deployment=deployment or DeploymentConfig(),
        )
        self.lost_nodes: frozenset[int] = frozenset()
        self.leaving_nodes: frozenset[int] = frozenset()
        self.roles = {name: self._fresh(name) for name in ("inference", "orchestrator", "trainer")}
        self.interrupted_by: int | None = None
        self.is_repeated = False
        self.is_last_step_committed = False

    def _fresh(self, name: str) -> RoleObservation:
        unit = INFERENCE if name == "inference" else TRAINING
        return RoleObservation(name=name, unit=unit, does_finish=unit == TRAINING, has_progressed=True)

    def knows(self, name: str, **facts: object) -> "History":
        self.roles[name] = replace(self.roles[name], **facts)  # type: ignore[arg-type]  # of several types
        return self

    def ends(self, name: str, code: int, *, at: float, **facts: object) -> "History":
        return self.knows(name, exit_code=code, ended_at=at, last_output_at=at, **facts)

    def starts(self, *names: str) -> "History":
        for name in names:
            self.roles[name] = self._fresh(name)
        return self

    def at(self, now: float) -> list[RecoveryAction]:
        return self.recovery.decide(
            RunObservation(
                now=now,
                roles=self.roles,
                interrupted_by=self.interrupted_by,
                is_repeated=self.is_repeated,
                is_last_step_committed=self.is_last_step_committed,
                lost_nodes=self.lost_nodes,
                leaving_nodes=self.leaving_nodes,
            )
        )

    def verdict(self, *, at: float) -> FinishRun:
        (action,) = self.at(at)
        assert isinstance(action, FinishRun), action
        return action

    def recovers_training(self, *, at: float) -> "History":
        """Kill the trainer; both roles end and are started again."""
        assert any(isinstance(action, AnnounceRestart) for action in self.ends("trainer", -9, at=at).at(at))
        self.ends("orchestrator", 143, at=at)
        assert self.at(at) == []
        assert self.at(at + MAX_BACKOFF_S) == [StartUnit(unit=TRAINING)]
        return self.starts("orchestrator", "trainer")
