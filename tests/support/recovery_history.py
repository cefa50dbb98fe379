"""Gives recovery histories of exits, signals and reports, and asks for its decisions."""

from dataclasses import replace
from pathlib import Path

from trivet.config.schema.deployment import DeploymentConfig, RecoveryConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import TransportConfig
from trivet.launcher.plan import TRAINING, ProcessSpec, RecoveryUnit
from trivet.launcher.supervision.observer import RoleObservation, RunObservation
from trivet.launcher.supervision.recovery import (
    MAX_BACKOFF_S,
    AnnounceRestart,
    FinishRun,
    Recovery,
    RecoveryAction,
    StartUnit,
)

PATIENCE_S = 60.0
INFERENCE, TEACHER = RecoveryUnit("inference"), RecoveryUnit("teacher")
STOP_S = 20.0
SIGINT, SIGTERM = 2, 15


def make_role(name: str, *, unit: RecoveryUnit, has_progressed: bool = True, **spec: object) -> RoleObservation:
    """Return a role that runs."""
    fields = {"argv": (), "log": Path("log"), "env": {}, "env_defaults": {}, "does_finish": unit == TRAINING, **spec}
    return RoleObservation(spec=ProcessSpec(name=name, unit=unit, **fields), has_progressed=has_progressed)  # type: ignore[arg-type]


class History:
    """A run as events at times of a fake clock. Every role has progressed unless the test says otherwise."""

    def __init__(self, *, deployment: DeploymentConfig | None = None, **recovery: object) -> None:
        sections = {"recovery": RecoveryConfig.model_validate(recovery), "deployment": deployment or DeploymentConfig()}
        transport = TransportConfig(timeout_s=PATIENCE_S)
        trainer = RLConfig().trainer.model_copy(update={"rollout_transport": transport})
        sections |= {"shutdown_timeout_s": STOP_S, "trainer": trainer}
        self.recovery = Recovery(RLConfig().model_copy(update=sections))
        self.lost_nodes: frozenset[int] = frozenset()
        self.leaving_nodes: frozenset[int] = frozenset()
        self.roles = {name: self._fresh(name) for name in ("inference", "orchestrator", "trainer")}
        self.interrupted_by: int | None = None
        self.is_repeated = False
        self.is_last_step_committed = False

    def _fresh(self, name: str) -> RoleObservation:
        return make_role(name, unit=INFERENCE if name == "inference" else TRAINING)

    def knows(self, name: str, **facts: object) -> "History":
        """Change what is observed of a role; `starts_after`, `node` and `work` are of its specification."""
        role = self.roles[name]
        spec = replace(role.spec, **{key: facts.pop(key) for key in ("starts_after", "node", "work") if key in facts})  # type: ignore[arg-type]
        self.roles[name] = replace(role, spec=spec, **facts)  # type: ignore[arg-type]  # of several types
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
