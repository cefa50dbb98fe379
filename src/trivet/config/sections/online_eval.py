"""Evaluations during a run: `[orchestrator.eval]` on environments of its own, `[orchestrator.val]` on the trained ones."""

from pydantic import Field

from trivet.config.sections.base import MAX_ROLLOUTS, Section
from trivet.config.sections.environment import EnvConfig
from trivet.config.sections.sampling import EvalSamplingConfig


class EvalEnvConfig(EnvConfig):
    """One environment to evaluate on. Its evaluation data set is used."""

    interval: int | None = Field(default=None, ge=1)
    """Instead of eval.interval."""
    num_examples: int | None = Field(default=None, ge=-1)
    """Instead of eval.num_examples."""
    rollouts_per_example: int | None = Field(default=None, ge=1, le=MAX_ROLLOUTS)
    """Instead of eval.rollouts_per_example."""
    skip_first: int = Field(default=0, ge=0)
    """Leave out this many examples at the start of the data set."""


class OnlineEvalConfig(Section):
    """The newest policy is measured whenever a multiple of `interval` was reached or passed, and after the last step."""

    interval: int = Field(default=100, ge=1)
    """Policy versions between evaluations."""
    env: list[EvalEnvConfig] = Field(min_length=1)
    """What to evaluate on; may name the same environments as training."""
    num_examples: int = Field(default=-1, ge=-1)
    """Examples per environment, from the first; -1 is all."""
    rollouts_per_example: int = Field(default=1, ge=1, le=MAX_ROLLOUTS)
    """Attempts at each example."""
    max_concurrent: int = Field(default=64, ge=1, le=MAX_ROLLOUTS)
    """Evaluation rollouts in flight, beside those that are trained on."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How evaluation rollouts are sampled; training's `sampling` does not apply."""
    eval_base_model: bool = True
    """Evaluate the start model before the first step."""
    skip_eval_on_resume: bool = True
    """A resumed run does not repeat the evaluation of the step that it resumes from; false: it does."""


class ValConfig(Section):
    """Validation on a few held-out examples of the environments that are trained on, sampled as in training: `val_reward/mean`."""

    num_examples: int = Field(default=16, ge=1)
    """Examples per environment."""
    rollouts_per_example: int = Field(default=1, ge=1, le=MAX_ROLLOUTS)
    """Attempts at each example."""
    interval: int = Field(default=10, ge=1)
    """Policy versions between validations."""
