"""Sections of the policy losses: `[trainer.loss]`.

The formulas are in `trainer.losses` and docs/losses.md. There d is the trainer's log-probability of a token minus the sampler's,
r = exp(d) is the importance ratio, and A is the advantage.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag

from trivet.config.schema.base import Section, type_or


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
    """Weight of the pull towards orchestrator.teacher_model. With adv_tau = 0 the policy learns from the teacher alone."""
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


class NormalizedLossConfig(PolicyLossConfig):
    """Keys of the losses whose tokens can be averaged in several ways."""

    normalization: Literal["token", "sample", "constant"] = "token"
    """Divisor: all loss tokens (DAPO), each sample's own length (GRPO), or samples times normalization_length (Dr. GRPO)."""
    normalization_length: int = Field(default=1024, ge=1)
    """Tokens that a sample counts for with normalization "constant", whatever its length."""


class GrpoLossConfig(NormalizedLossConfig):
    """PPO's clipped objective on group advantages."""

    type: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Below 1 - clip_low the ratio is not decreased further."""
    clip_high: float = Field(default=0.2, ge=0)
    """Above 1 + clip_high the ratio is not increased further; DAPO raises it to 0.28."""


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


class LuspoLossConfig(PolicyLossConfig):
    """GSPO's objective, each sample times its length, so that long samples do not weigh less."""

    type: Literal["luspo"] = "luspo"
    clip_low: float = Field(default=2e-3, ge=0, le=1)
    """Below 1 - clip_low the ratio is not decreased further."""
    clip_high: float = Field(default=2.5e-3, ge=0)
    """Above 1 + clip_high the ratio is not increased further."""


class GmpoLossConfig(PolicyLossConfig):
    """The geometric mean of a sample's clipped ratios."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0)
    """A token's log-ratio is not decreased below -clip_low: its ratio not below 0.67."""
    clip_high: float = Field(default=0.4, ge=0)
    """A token's log-ratio is not increased above clip_high: its ratio not above 1.49."""


class SapoLossConfig(NormalizedLossConfig):
    """A smooth gate on the ratio instead of a clip: the further a token has moved, the less gradient it has."""

    type: Literal["sapo"] = "sapo"
    tau_pos: float = Field(default=1.0, gt=0)
    """Sharpness of the gate for tokens with a positive advantage."""
    tau_neg: float = Field(default=1.05, gt=0)
    """Sharpness of the gate for the others, whose gradients spread over the whole vocabulary and are less stable."""
    normalization: Literal["token", "sample", "constant"] = "sample"
    """Divisor: each sample's own length as in the paper, all loss tokens, or samples times normalization_length."""


class VespoLossConfig(PolicyLossConfig):
    """A smooth, detached weight for each sample from the product of its ratios, without a division by its length."""

    type: Literal["vespo"] = "vespo"
    k_pos: float = Field(default=2.0, ge=0)
    """For advantages of at least 0: power of the product, which bounds samples that have become unlikely."""
    lambda_pos: float = Field(default=3.0, ge=1e-4)
    """For advantages of at least 0: decay with the product, which bounds samples that have become likely."""
    k_neg: float = Field(default=3.0, ge=0)
    """The power for negative advantages."""
    lambda_neg: float = Field(default=2.0, ge=1e-4)
    """The decay for negative advantages."""


class ClipCovLossConfig(PolicyLossConfig):
    """PPO's objective, without the gradient of a few tokens that would make the policy narrower fastest."""

    type: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """Below 1 - clip_low the ratio is not decreased further; 1 does not bound it from below, as in the authors' runs."""
    clip_high: float = Field(default=1.0, ge=0)
    """Above 1 + clip_high the ratio is not increased further."""
    cov_ratio: float = Field(default=2e-4, gt=0, le=1)
    """Share of the step's tokens that lose their gradient, at least one."""
    cov_low: float = 1.0
    """They are chosen among tokens with a covariance above this."""
    cov_high: float = 5.0
    """They are chosen among tokens with a covariance below this."""


class KlCovLossConfig(PolicyLossConfig):
    """The ratio times the advantage, with a penalty on the tokens that would make the policy narrower fastest."""

    type: Literal["kl_cov"] = "kl_cov"
    cov_ratio: float = Field(default=2e-3, gt=0, le=1)
    """Share of the step's tokens that are penalised, those of the highest covariance; the authors have 2e-4 for 32B."""
    kl_coef: float = Field(default=1.0, ge=0)
    """Weight of the penalty, the size of the log-ratio."""


class CorrectionPreset(NamedTuple):
    """How an importance weight corrects for the sampler."""

    weight: Literal["none", "token", "sequence"] = "none"
    """1 for every token, the token's ratio, or the product of its sample's ratios."""
    low: float = 0.0
    high: float = math.inf
    is_masking: bool = False
    """True: a weight beyond `low` or `high` becomes 0. False: it becomes the bound."""
    geo_low: float = 0.0
    geo_high: float = math.inf
    """Samples whose geometric mean ratio is beyond these have weight 0."""


PresetName = Literal[
    "token_tis",
    "sequence_tis",
    "token_mis",
    "sequence_mis",
    "icepop",
    "geometric",
    "geometric_token_tis",
    "geometric_sequence_tis",
]
PRESETS: dict[PresetName, CorrectionPreset] = {
    "token_tis": CorrectionPreset("token", high=2.0),
    "sequence_tis": CorrectionPreset("sequence", high=2.0),
    "token_mis": CorrectionPreset("token", high=3.0, is_masking=True),
    "sequence_mis": CorrectionPreset("sequence", low=0.5, high=2.0, is_masking=True),
    "icepop": CorrectionPreset("token", low=0.5, high=5.0, is_masking=True),
    "geometric": CorrectionPreset(geo_low=0.999, geo_high=1.001),
    "geometric_token_tis": CorrectionPreset("token", high=2.0, geo_low=0.999, geo_high=1.001),
    "geometric_sequence_tis": CorrectionPreset("sequence", high=2.0, geo_low=0.999, geo_high=1.001),
}
"""The corrections by name. Bounds are those of verl's presets; `token_mis`, which verl has not, has TRL's."""


class CorrectedLossConfig(NormalizedLossConfig):
    """Keys of the losses that correct for the sampler by a preset."""

    preset: PresetName = "token_tis"
    """`tis` truncates weights, `mis` and `icepop` mask tokens or samples by them, `geometric` masks whole samples."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound of the weight. Unset: the preset's."""
    high: float | None = Field(default=None, gt=0)
    """Upper bound of the weight. Unset: the preset's."""
    geo_low: float | None = Field(default=None, ge=0)
    """Samples whose geometric mean ratio is smaller carry no gradient. Unset: the preset's."""
    geo_high: float | None = Field(default=None, gt=0)
    """Samples whose geometric mean ratio is larger carry no gradient. Unset: the preset's."""

    @property
    def correction(self) -> CorrectionPreset:
        """The preset with the bounds that are set here."""
        bounds = {name: getattr(self, name) for name in ("low", "high", "geo_low", "geo_high")}
        return PRESETS[self.preset]._replace(**{name: bound for name, bound in bounds.items() if bound is not None})

    def _problems(self) -> Iterator[str]:
        found = self.correction
        if found.weight == "none" and (self.low is not None or self.high is not None):
            yield f'preset "{self.preset}" has no weight; remove low and high, or change the preset'
        for name, low, high in (("low", found.low, found.high), ("geo_low", found.geo_low, found.geo_high)):
            if low >= high:
                yield f"{name} ({low:g}) must be < {name.replace('low', 'high')} ({high:g}): no token would be trained on"


class ImportanceLossConfig(CorrectedLossConfig):
    """Detached importance weights that are truncated or masked, by the names that verl and TRL made common."""

    type: Literal["importance"] = "importance"


class DecoupledLossConfig(CorrectedLossConfig):
    """PPO's objective against the policy that the batch found, corrected from the sampler to that policy by a weight."""

    type: Literal["decoupled"] = "decoupled"
    preset: PresetName = "token_mis"
    """The correction; AReaL's has high = 5."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Below 1 - clip_low the ratio to the proximal policy is not decreased further."""
    clip_high: float = Field(default=0.2, ge=0)
    """Above 1 + clip_high the ratio to the proximal policy is not increased further."""


class CustomLossConfig(PolicyLossConfig):
    """A function of yours, called for each sample: see `trainer.losses.custom`."""

    type: Literal["custom"] = "custom"
    import_path: str = Field(pattern=r"^([\w.]+[.:]|.+\.py:)\w+$")
    """`package.module.function` of an installed package or of PYTHONPATH, or `path/to/file.py:function`."""
    kwargs: dict[str, Any] = {}
    """Passed to the function."""
    unit: Literal["token", "sample"] = "token"
    """Divisor of the sum of the samples' losses: loss tokens or samples, over all rows and ranks."""


LossConfig = Annotated[
    Annotated[DefaultLossConfig, Tag("default")]
    | Annotated[CispoLossConfig, Tag("cispo")]
    | Annotated[AipoLossConfig, Tag("aipo")]
    | Annotated[GrpoLossConfig, Tag("grpo")]
    | Annotated[GspoLossConfig, Tag("gspo")]
    | Annotated[DppoLossConfig, Tag("dppo")]
    | Annotated[IpoLossConfig, Tag("ipo")]
    | Annotated[LuspoLossConfig, Tag("luspo")]
    | Annotated[GmpoLossConfig, Tag("gmpo")]
    | Annotated[SapoLossConfig, Tag("sapo")]
    | Annotated[VespoLossConfig, Tag("vespo")]
    | Annotated[ClipCovLossConfig, Tag("clip_cov")]
    | Annotated[KlCovLossConfig, Tag("kl_cov")]
    | Annotated[ImportanceLossConfig, Tag("importance")]
    | Annotated[DecoupledLossConfig, Tag("decoupled")]
    | Annotated[CustomLossConfig, Tag("custom")],
    Discriminator(type_or("default")),
]
