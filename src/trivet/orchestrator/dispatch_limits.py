"""Decides from the configuration how many groups the dispatcher may start, and how fast. It keeps no state."""

from dataclasses import dataclass

from trivet.algorithms.concurrency import TokenBucket
from trivet.algorithms.rounding import round_down
from trivet.algorithms.staleness import may_dispatch
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.wire.versions import PolicyVersion, Step

_BURST_S = 5.0
"""Seconds' worth of `tasks_per_minute` that may start at once: a limit of few per minute still fills whole groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers that bound what the dispatcher starts."""

    rollouts_per_example: int
    rollouts_per_step: int
    """floor(batch_size * oversampling_factor)."""
    max_rollouts_in_flight: int
    max_async_level: int
    seq_len: int
    """Longer samples are cut."""
    is_truncated_worth_nothing: bool = False
    """A rollout that was cut gets reward 0."""
    tasks_per_minute: int | None = None
    """Rollouts started per minute."""
    groups_per_round: int | None = None
    """Of a deterministic run: the groups of a batch, which start together."""

    @classmethod
    def of(cls, config: OrchestratorConfig) -> "Limits":
        """Return the limits that `config` asks for."""
        per_step = round_down(config.batch_size * config.oversampling_factor)
        return cls(
            rollouts_per_example=config.rollouts_per_example,
            rollouts_per_step=per_step,
            max_rollouts_in_flight=min(per_step, config.max_concurrent or per_step),
            max_async_level=config.max_async_level,
            seq_len=config.seq_len,
            is_truncated_worth_nothing=config.zero_truncated_completions,
            tasks_per_minute=config.tasks_per_minute,
            groups_per_round=config.batch_size // config.rollouts_per_example if config.deterministic else None,
        )

    def may_dispatch(self, *, step: Step, version: PolicyVersion, rollouts_ahead: int) -> bool:
        """Return whether a rollout of policy `version` that starts now would be young enough for its batch.

        Args:
            step: the batch being filled.
            rollouts_ahead: rollouts in flight or ready, which go into batches before it.
        """
        return may_dispatch(
            step=step,
            version=version,
            rollouts_ahead=rollouts_ahead,
            rollouts_per_step=self.rollouts_per_step,
            max_async_level=self.max_async_level,
        )

    def make_bucket(self, now: float) -> TokenBucket | None:
        """Return the bucket that holds rollouts to `tasks_per_minute`; None without such a limit."""
        if self.tasks_per_minute is None:
            return None
        burst = max(self.rollouts_per_example, self.tasks_per_minute / 60 * _BURST_S)
        return TokenBucket(per_minute=self.tasks_per_minute, burst=burst, now=now)
