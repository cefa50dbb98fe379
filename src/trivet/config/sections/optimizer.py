"""`[trainer.optim]` and `[optim]` of supervised fine-tuning: how gradients become updates."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from trivet.config.sections.base import Section, type_or


class CommonOptimizerConfig(Section):
    """Keys that every optimizer has."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Share of a parameter that each step removes, times the learning rate. With `sgd` it is part of the gradient instead."""
    max_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; None: do not clip."""


class AdamWConfig(CommonOptimizerConfig):
    """Adam with decoupled weight decay."""

    type: Literal["adamw"] = "adamw"
    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    betas2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""


class SGDConfig(CommonOptimizerConfig):
    """One number of state per parameter, none without momentum. Updates are as large as gradients: it needs a far higher lr."""

    type: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the momentum; 0: none, an update follows the gradient itself."""
    nesterov: bool = True
    """Look one update ahead. Needs momentum."""

    @model_validator(mode="after")
    def _fits_together(self) -> "SGDConfig":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov looks ahead along the momentum, which is 0: set nesterov = false or momentum above 0")
        return self


class MuonConfig(CommonOptimizerConfig):
    """Orthogonalized momentum for the matrices of blocks; AdamW for embeddings, head, norms and stacks of experts.

    Updates of both are of like size, so that one lr serves both.
    """

    type: Literal["muon"] = "muon"
    mu: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the momentum of matrices."""
    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    betas2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's second moment."""


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[SGDConfig, Tag("sgd")] | Annotated[MuonConfig, Tag("muon")],
    Discriminator(type_or("adamw")),
]
