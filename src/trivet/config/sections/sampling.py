"""Sections for how tokens are sampled: the run's, the changes of one environment, and that of evaluations."""

from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from trivet.algorithms.schedules import cosine_value, linear_value
from trivet.config.sections.base import MAX_TOKENS, Section


class TempSchedulerConfig(Section):
    """Temperature as a function of the step that was being filled when a group started."""

    type: Literal["linear", "cosine"] = "linear"
    """Straight from start to end, or half a cosine."""
    start_temperature: float = Field(default=1.0, gt=0)
    """Temperature at step 1."""
    end_temperature: float = Field(default=1.0, gt=0)
    """Temperature at total_steps and after it."""
    total_steps: int | None = Field(default=None, ge=1)
    """Steps from start to end. Unset: max_steps of the first start; a resume with another max_steps keeps it."""

    def temperature_at(self, step: int, *, max_steps: int | None) -> float:
        """Return the temperature at `step`.

        Args:
            max_steps: the run's; needed, and checked before, if `total_steps` is not set.
        """
        schedule = {"linear": linear_value, "cosine": cosine_value}[self.type]
        num_steps = self.total_steps or max_steps or 1
        return schedule(step, start=self.start_temperature, end=self.end_temperature, num_steps=num_steps)


class RequestSamplingConfig(Section):
    """Sampling apart from the temperature."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Tokens per model turn; unset: up to the context's end."""
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """No stop token before this many; above 0 biases the importance ratio."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 biases the importance ratio, which the trainer computes over the whole vocabulary."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among the k likeliest; -1 and 0 are off. Biases the importance ratio."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens below this share of the likeliest; biases the importance ratio."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """1 is off; biases the importance ratio."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """0 is off; biases the importance ratio."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """0 is off; biases the importance ratio."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of each request, combined with its group and index; unset: not reproducible."""
    extra_body: dict[str, Any] = {}
    """Further request fields. A knob that has a key above is refused here."""


class SamplingConfig(RequestSamplingConfig):
    """Sampling in training."""

    temperature: float | None = Field(default=None, gt=0)
    """The trainer divides logits by it too. Unset: 1.0, or what temp_scheduler says."""
    temp_scheduler: TempSchedulerConfig | None = None
    """A temperature that changes with the step, instead of `temperature`."""

    @model_validator(mode="after")
    def _one_temperature(self) -> "SamplingConfig":
        if self.temperature is not None and self.temp_scheduler is not None:
            raise ValueError(
                f"temperature ({self.temperature}) and temp_scheduler (start_temperature "
                f"{self.temp_scheduler.start_temperature}) exclude each other; remove one"
            )
        return self

    def temperature_at(self, step: int, *, max_steps: int | None) -> float:
        """Return the temperature of groups that start while batch `step` is being filled."""
        if self.temp_scheduler is not None:
            return self.temp_scheduler.temperature_at(step, max_steps=max_steps)
        return 1.0 if self.temperature is None else self.temperature


class EvalSamplingConfig(RequestSamplingConfig):
    """Sampling in evaluations."""

    temperature: float = Field(default=1.0, ge=0)
    """0 always takes the likeliest token."""


RunSamplingT = TypeVar("RunSamplingT", SamplingConfig, EvalSamplingConfig)


class EnvSamplingConfig(Section):
    """Changes to sampling in one environment. A key that is not set has the value of the run's `sampling`."""

    temperature: float | None = Field(default=None, gt=0)
    """Replaces the run's temperature or its schedule."""
    temp_scheduler: TempSchedulerConfig | None = None
    """Replaces the run's temperature or its schedule."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Tokens per model turn."""
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    """No stop token before this many."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample among the k likeliest; -1 and 0 are off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Drop tokens below this share of the likeliest."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """1 is off."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """0 is off."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """0 is off."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of each request, combined with its group and index."""
    extra_body: dict[str, Any] = {}
    """Further request fields, merged over the run's field by field."""

    @model_validator(mode="after")
    def _one_temperature(self) -> "EnvSamplingConfig":
        if self.temperature is not None and self.temp_scheduler is not None:
            raise ValueError(f"temperature ({self.temperature}) and temp_scheduler exclude each other; remove one")
        return self

    def over(self, run: RunSamplingT) -> RunSamplingT:
        """Return `run` with this environment's changes. Sampling of evaluations has no schedule."""
        changes = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        changes["extra_body"] = {**run.extra_body, **self.extra_body}
        if isinstance(run, SamplingConfig) and self.temperature is not None:
            changes["temp_scheduler"] = None
        elif isinstance(run, SamplingConfig) and self.temp_scheduler is not None:
            changes["temperature"] = None
        return run.model_copy(update=changes)
