"""`rope_scaling`: other rotary positions than those of the model's config.json. Trainer and server must have the same."""

from typing import Literal

from pydantic import Field, model_validator

from trivet.config.sections.base import Section
from trivet.config.tables import as_table
from trivet.errors import ConfigError


class RopeScalingConfig(Section):
    """Stretch the model's positions, for contexts longer than those that it was trained on."""

    rope_type: Literal["linear", "yarn", "llama3"]
    """How positions are stretched. Types that depend on the length of each request (`dynamic`, `longrope`) are left out: trainer
    and server would compute different probabilities."""
    factor: float = Field(gt=0)
    """How many times longer the context becomes."""
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """The context that the model was trained on, tokens. `yarn` and `llama3` need it."""
    attention_factor: float | None = Field(default=None, gt=0)
    """For `yarn`: scale of the attention logits; unset: computed from the factor."""
    beta_fast: float | None = Field(default=None, gt=0)
    """For `yarn`: rotations within the original context above which a dimension stays as it is; unset: 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """For `yarn`: rotations below which a dimension is stretched by the whole factor; unset: 1."""
    low_freq_factor: float | None = Field(default=None, gt=0)
    """For `llama3`, which needs it: wavelengths above the original context over this are stretched by the whole factor."""
    high_freq_factor: float | None = Field(default=None, gt=0)
    """For `llama3`, which needs it: wavelengths below the original context over this stay as they are."""

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "RopeScalingConfig":
        needed = {
            "linear": (),
            "yarn": ("original_max_position_embeddings",),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        }[self.rope_type]
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f'rope_type "{self.rope_type}" needs {" and ".join(missing)}; set what is missing')
        return self

    def over(self, own: object, *, model: str) -> dict[str, object]:
        """Return `rope_parameters` of config.json with these values over the model's own.

        Args:
            own: the model's `rope_parameters`.
            model: its name, for messages.

        Raises:
            ConfigError: the model has no rotary positions that all its layers share.
        """
        parameters = as_table(own)
        if parameters is None or "rope_theta" not in parameters:
            raise ConfigError(
                f"model.rope_scaling does not apply: {model} has no rotary positions that all its layers share; remove it"
            )
        return {**parameters, **self.model_dump(exclude_none=True)}
