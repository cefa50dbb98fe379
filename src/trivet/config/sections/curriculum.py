"""Sections for buffer, advantage and filters: which examples and rollouts are trained on, and how they are compared."""

from typing import Any, Literal

from pydantic import Field, model_validator

from trivet.config.sections.base import Section


class BufferConfig(Section):
    """Every environment's examples are in three pools, easy, normal and hard. Groups start from the normal pool only."""

    seed: int | None = Field(default=None, ge=0)
    """Seeds the order of examples; unset: orchestrator.seed."""
    env_ratios: list[float] | None = None
    """Share of groups of each environment, in the order of [[orchestrator.env]]; any positive numbers, e.g. [2, 1].
    Unset: by the number of examples."""
    online_difficulty_filtering: bool = False
    """Leave out groups whose rollouts all have the same reward: they carry no gradient."""
    easy_threshold: float | None = None
    """An example whose group has at least this mean reward moves to the easy pool; unset: none does."""
    hard_threshold: float | None = None
    """An example whose group has at most this mean reward moves to the hard pool; unset: none does."""
    easy_fraction: float = Field(default=0.0, ge=0, le=1)
    """On resume, this share of each easy pool returns to the normal pool; the examples that left it first return first."""
    hard_fraction: float = Field(default=0.0, ge=0, le=1)
    """On resume, this share of each hard pool returns to the normal pool; the examples that left it first return first."""
    recheck_interval: int | None = Field(default=None, ge=1)
    """An easy or hard example returns to the normal pool after this many steps, to be tried again; unset: only on resume."""
    hash_keys: list[str] = Field(default=["task", "prompt"], min_length=1)
    """Columns of the data set that name an example when a run is resumed on data that has grown or changed."""

    @model_validator(mode="after")
    def _thresholds_leave_room(self) -> "BufferConfig":
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise ValueError(
                f"easy_threshold ({easy}) must be > hard_threshold ({hard}): no reward would keep an example in the normal pool"
            )
        return self

    @model_validator(mode="after")
    def _ratios_are_positive(self) -> "BufferConfig":
        for index, ratio in enumerate(self.env_ratios or []):
            if ratio <= 0:
                raise ValueError(f"env_ratios must be positive numbers, got {ratio} at place {index}; remove the environment")
        return self


class AdvantageConfig(Section):
    """The rule that compares the reward of a rollout with those of its group."""

    type: Literal["default", "length_weighted_mean", "rloo", "std_norm", "max_rl", "none", "custom"] = "default"
    """`default` subtracts the group's mean reward, `length_weighted_mean` the mean weighted by completion lengths, `rloo` the
    mean of the others; `std_norm` divides by the standard deviation too (GRPO), `max_rl` by the mean; `none` is the reward
    itself; `custom` calls import_path."""
    length_weighted_mean: bool = False
    """With `default`: the same as type `length_weighted_mean`."""
    eps: float = Field(default=1e-6, gt=0)
    """With `std_norm`: added to the standard deviation."""
    import_path: str | None = None
    """With `custom`: `module.function` of (inputs, **kwargs), with inputs.rewards and inputs.completion_lengths of one group,
    that returns one advantage per rollout. The module is installed, or in a directory that PYTHONPATH names;
    `path/to/file.py:function` names one in any file."""
    kwargs: dict[str, Any] = {}
    """With `custom`: further arguments of the function."""

    @model_validator(mode="after")
    def _keys_fit_the_type(self) -> "AdvantageConfig":
        owners = {"length_weighted_mean": "default", "eps": "std_norm", "import_path": "custom", "kwargs": "custom"}
        for name, owner in owners.items():
            if self.type != owner and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} applies to type "{owner}", got type "{self.type}"; remove it or change the type')
        if self.type == "custom" and self.import_path is None:
            raise ValueError('type "custom" needs import_path, e.g. import_path = "my_package.my_module.my_function"')
        return self

    @property
    def needs_a_group(self) -> bool:
        """True when one rollout alone has no advantage: it is compared with the others of its group."""
        return self.type not in ("none", "custom")


class ZeroAdvantageFilterConfig(Section):
    """Rollouts whose advantage is exactly 0."""

    enforce: bool = False
    """Train on none of their tokens: they no longer count in the loss's mean. False: only measure."""


class RepetitionFilterConfig(Section):
    """Rollouts that repeat themselves: many tokens in a row of which the model was nearly certain."""

    window: int = Field(default=3000, ge=2)
    """Length of the repetition, tokens."""
    prob_threshold: float = Field(default=0.99, gt=0, lt=1)
    """Each of these tokens was sampled with a probability above this."""
    enforce: bool = False
    """Train on none of their tokens. False: only measure."""


class GibberishFilterConfig(Section):
    """Rollouts with a rare token to which the model itself gave almost no probability."""

    token_id_threshold: int = Field(default=100_000, ge=0)
    """Rare tokens are those with a greater id: tokenizers number them by frequency. Lower it for small vocabularies."""
    max_logprob: float = Field(default=-14.0, lt=0)
    """Log-probability below which a rare token counts: -14 is e^2 times less than a blind guess among 160,000 tokens."""
    enforce: bool = False
    """Train on none of their tokens. False: only measure."""


class FiltersConfig(Section):
    """Filters that find broken rollouts. The first one that fits a rollout names the reason. It stays in its group's baseline."""

    repetition: RepetitionFilterConfig | None = RepetitionFilterConfig()
    gibberish: GibberishFilterConfig | None = GibberishFilterConfig()
    zero_advantage: ZeroAdvantageFilterConfig | None = ZeroAdvantageFilterConfig()
