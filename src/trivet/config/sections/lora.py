"""Low-rank adapters: what the trainer adds to the frozen model, in PEFT's words."""

import re

from pydantic import Field, field_validator

from trivet.config.sections.base import Section

MAX_RANK = 512
"""The largest that a server can hold."""


class LoRAConfig(Section):
    """Low-rank matrices beside frozen weights; what is published is they alone, in PEFT's format."""

    rank: int = Field(default=16, ge=1, le=MAX_RANK)
    """Inner dimension of each adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are zeroed in training. Above 0 the trainer's log-probabilities are noisy, and loss and
    gradient depend on how rows are packed."""
    target_modules: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Linear modules that get an adapter: the last part or parts of their names, or a regular expression for the whole name."""
    modules_to_save: list[str] = []
    """Modules that are trained whole and saved with the adapter, by name, e.g. ["norm"]. Servers cannot load them: for `sft`."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that large ranks learn as fast as small ones."""

    @field_validator("target_modules")
    @classmethod
    def _are_expressions(cls, targets: list[str]) -> list[str]:
        if not targets:
            raise ValueError('must name at least one module, e.g. ["q_proj", "v_proj"]')
        for target in targets:
            try:
                re.compile(target)
            except re.error as exc:
                raise ValueError(f"{target!r} is neither a name nor a regular expression: {exc}") from exc
        return targets
