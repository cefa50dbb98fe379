"""Section for the reactions to a run that learns nothing or breaks; `algorithms.detectors` finds the signs."""

from typing import Literal

from pydantic import Field

from trivet.config.sections.base import Section

Reaction = Literal["warn", "stop", "off"]


class DetectorsConfig(Section):
    """Each detector warns, stops the run with exit code 3, or is off."""

    equal_rewards: Reaction = "warn"
    """Every rollout of a batch has the same reward."""
    zero_advantages: Reaction = "warn"
    """No group of a batch has rollouts of different reward."""
    failed_rollouts: Reaction = "warn"
    """At least failed_share of the groups failed."""
    truncated: Reaction = "warn"
    """At least truncated_share of the rollouts were cut off."""
    entropy_collapse: Reaction = "warn"
    """Entropy fell below entropy_share of its level in the first five steps."""
    mismatch_drift: Reaction = "warn"
    """The mismatch KL between trainer and server exceeds mismatch_kl."""
    gradient_spike: Reaction = "warn"
    """The gradient norm is gradient_factor times its median of the last 20 steps. Reports at once."""
    stuck_policy: Reaction = "warn"
    """The servers held one policy over stuck_policy_steps batches."""
    no_loss_tokens: Reaction = "warn"
    """A batch has nothing to train on. Reports at once."""
    patience: int = Field(default=3, ge=1)
    """Steps in a row before a detector reports, unless it reports at once: one bad batch may be chance."""
    failed_share: float = Field(default=0.5, gt=0, le=1)
    """Share of failed groups at which `failed_rollouts` reports. When half of them fail, the environment is the likely cause."""
    truncated_share: float = Field(default=0.5, gt=0, le=1)
    """Share of rollouts that were cut at which `truncated` reports. Such a rollout is rewarded for its beginning alone."""
    entropy_share: float = Field(default=0.02, gt=0, lt=1)
    """Share of the first entropy below which `entropy_collapse` reports. Learning lowers it; a fiftieth explores nothing."""
    mismatch_kl: float = Field(default=0.1, gt=0)
    """KL divergence above which `mismatch_drift` reports, nats per token. Healthy runs stay below 0.01
    with full fine-tuning, one or two policies behind."""
    gradient_factor: float = Field(default=20.0, gt=1)
    """Multiple of the median at which `gradient_spike` reports. With small batches the norm varies by a factor of a few."""
    stuck_policy_steps: int = Field(default=10, ge=2)
    """Batches with one policy at which `stuck_policy` reports: more than any usual max_async_level."""
