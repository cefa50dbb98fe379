"""`[trainer.loss]`: the loss that is minimised. The formulas are in `trainer.losses`.

There d is a token's log-probability of the trainer minus that of the sampler, r = exp(d) the importance ratio, A the advantage.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from trivet.config.sections.base import Section, type_or


class PolicyLossConfig(Section):
    """Keys that every policy loss has."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to a frozen reference policy. Above 0 each step has a second forward."""
    reference_update_interval: int | None = Field(default=None, ge=1)
    """Steps after which the reference becomes the current policy; unset: it stays the start model."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus, which keeps the policy from narrowing too soon."""

    @property
    def needs_teacher(self) -> bool:
        """True if every batch must have a teacher's log-probabilities."""
        return False


class DefaultLossConfig(PolicyLossConfig):
    """Masked, detached importance sampling, as prime-rl had it by default from December 2025 to March 2026."""

    type: Literal["default"] = "default"
    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or of its whole sample."""
    token_mask_low: float = Field(default=0.125, ge=0)
    """Tokens with a smaller ratio carry no gradient."""
    token_mask_high: float = Field(default=8.0, gt=0)
    """Tokens with a larger ratio carry no gradient."""
    sequence_clip_high: float = Field(default=10.0, gt=0)
    """Upper clip of the sequence ratio."""
    geo_mask_low: float = Field(default=0.1, ge=0)
    """Samples whose geometric mean ratio is smaller carry no gradient."""
    geo_mask_high: float = Field(default=10.0, gt=0)
    """Samples whose geometric mean ratio is larger carry no gradient."""
    sequence_mask_low: float = Field(default=0.0, ge=0)
    """Samples with any token ratio below this carry no gradient."""
    sequence_mask_high: float = Field(default=100.0, gt=0)
    """Samples with any token ratio above this carry no gradient."""
    adv_tau: float = Field(default=1.0, ge=0)
    """Weight of the advantage."""
    teacher_tau: float = Field(default=0.0, ge=0)
    """Weight of the pull towards a teacher, which orchestrator.teacher_model names: on-policy distillation. With adv_tau = 0 the
    policy learns from the teacher alone."""
    kl_tau: float = Field(default=0.0, ge=0)
    """Weight of the log-ratio penalty against the sampling policy."""

    @property
    def needs_teacher(self) -> bool:
        """True if every batch must have a teacher's log-probabilities."""
        return self.teacher_tau > 0


class CispoLossConfig(PolicyLossConfig):
    """Clipped, detached importance weights: no token loses its gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """Weights are at least 1 - clip_low; 1 does not bound them from below, as in the paper."""
    clip_high: float = Field(default=5.0, ge=0)
    """Weights are at most 1 + clip_high."""


class AipoLossConfig(PolicyLossConfig):
    """Importance weights truncated from above alone."""

    type: Literal["aipo"] = "aipo"
    clip_ratio: float = Field(default=8.0, gt=0)
    """Weights are at most this; the paper has 2 to 10."""


class GrpoLossConfig(PolicyLossConfig):
    """PPO's clipped objective on group advantages."""

    type: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Below 1 - clip_low the ratio is not decreased further."""
    clip_high: float = Field(default=0.2, ge=0)
    """Above 1 + clip_high the ratio is not increased further; DAPO raises it to 0.28."""
    normalization: Literal["token", "sample", "constant"] = "token"
    """What the sum over tokens is divided by: all loss tokens (DAPO), each sample's own length and then the samples (GRPO), or
    samples times normalization_length (Dr. GRPO)."""
    normalization_length: int = Field(default=1024, ge=1)
    """Tokens that a sample counts for with normalization "constant", whatever its length."""


class GspoLossConfig(PolicyLossConfig):
    """PPO's clipped objective with one length-normalised ratio per sample."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """Below 1 - clip_low the ratio is not decreased further. Whole samples stay much closer to 1 than single tokens."""
    clip_high: float = Field(default=4e-4, ge=0)
    """Above 1 + clip_high the ratio is not increased further."""


class DppoLossConfig(PolicyLossConfig):
    """Tokens whose probability has moved too far in the direction of their advantage carry no gradient."""

    type: Literal["dppo"] = "dppo"
    dppo_mask_low: float = Field(default=0.2, ge=0, le=1)
    """The largest fall of the probability of a token without a positive advantage."""
    dppo_mask_high: float = Field(default=0.2, ge=0, le=1)
    """The largest rise of the probability of a token with a positive advantage."""
    adv_tau: float = Field(default=1.0, ge=0)
    """Weight of the advantage."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of d squared, on every loss token."""


class IpoLossConfig(PolicyLossConfig):
    """Tokens whose probability has moved too far in either direction carry no gradient."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(default=0.1, ge=0, le=1)
    """The largest change of the probability."""
    adv_tau: float = Field(default=1.0, ge=0)
    """Weight of the advantage."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of d squared, on every loss token."""


class CustomLossConfig(PolicyLossConfig):
    """A function of yours, called for each sample: see `trainer.losses.custom`."""

    type: Literal["custom"] = "custom"
    import_path: str = Field(pattern=r"^([\w.]+[.:]|.+\.py:)\w+$")
    """`package.module.function`, of a package that is installed or of a directory that PYTHONPATH names, or
    `path/to/file.py:function`. The working directory is not searched: files there would stand in for packages of the same name."""
    kwargs: dict[str, Any] = {}
    """Passed to the function."""
    unit: Literal["token", "sample"] = "token"
    """What the sum of the samples' losses is divided by: loss tokens or samples, over all rows and ranks."""


LossConfig = Annotated[
    Annotated[DefaultLossConfig, Tag("default")]
    | Annotated[CispoLossConfig, Tag("cispo")]
    | Annotated[AipoLossConfig, Tag("aipo")]
    | Annotated[GrpoLossConfig, Tag("grpo")]
    | Annotated[GspoLossConfig, Tag("gspo")]
    | Annotated[DppoLossConfig, Tag("dppo")]
    | Annotated[IpoLossConfig, Tag("ipo")]
    | Annotated[CustomLossConfig, Tag("custom")],
    Discriminator(type_or("default")),
]
