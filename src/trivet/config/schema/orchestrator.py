"""Sections of the orchestrator: the choice of rollouts to train on, their comparison within a group, and the teacher."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from trivet.config.schema.base import MAX_ROLLOUTS, MAX_TOKENS, Section
from trivet.config.schema.environment import (
    EnvConfig,
    EnvNodesConfig,
    EnvWorkersConfig,
    OnlineEvalConfig,
    SamplingConfig,
    ValConfig,
)
from trivet.config.schema.inference import ClientConfig, ConcurrencyConfig
from trivet.config.schema.shared import DEFAULT_MODEL, SteppingRoleConfig, TransportConfig


class BufferConfig(Section):
    """Every environment's examples are in three pools, easy, normal and hard. Groups start from the normal pool only."""

    seed: int | None = Field(default=None, ge=0)
    """Seeds the order of examples; unset: orchestrator.seed."""
    env_ratios: list[float] | None = None
    """Share of groups of each [[orchestrator.env]], in their order, as positive numbers; unset: by numbers of examples."""
    online_difficulty_filtering: bool = False
    """Leave out groups whose rollouts all have the same reward and advantage: they carry no gradient."""
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

    def _problems(self) -> Iterator[str]:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            yield (
                f"easy_threshold ({easy}) must be > hard_threshold ({hard}): no reward would keep an example in the normal pool"
            )
        for index, ratio in enumerate(self.env_ratios or []):
            if ratio <= 0:
                yield f"env_ratios must be positive numbers, got {ratio} at place {index}; remove the environment"


_MAX_WEIGHT = 1e6
"""The largest weight of a score. A larger one is a mistake, and advantages have to fit into float32."""


class AdvantageConfig(Section):
    """The rule that compares the reward of a rollout with those of its group."""

    type: Literal[
        "default", "length_weighted_mean", "rloo", "std_norm", "max_rl", "gdpo", "turns", "agents", "none", "custom"
    ] = "default"
    """`default` subtracts the group's mean reward, `length_weighted_mean` the mean weighted by completion lengths, `rloo` the
    mean of the others; `std_norm` divides by the standard deviation too (GRPO), `max_rl` by the mean; `gdpo` standardises
    each of `components` and adds them; `turns` compares the rewards from a turn on, `agents`
    each agent with itself; `none` is the reward itself; `custom` calls import_path."""
    length_weighted_mean: bool = False
    """For `default`: the same as type `length_weighted_mean`."""
    eps: float = Field(default=1e-6, gt=0)
    """For `std_norm` and `gdpo`: added to the standard deviation."""
    components: dict[str, float] = {}
    """For `gdpo`: weight of each score, by the name of its reward function or metric, in a rollout's `scores`."""
    import_path: str | None = None
    """For `custom`: `module.function` or `path/to/file.py:function` of (inputs, **kwargs); returns an advantage per rollout
    or per sampled token."""
    kwargs: dict[str, Any] = {}
    """For `custom`: further arguments of the function."""

    def _problems(self) -> Iterator[str]:
        owners = {
            "length_weighted_mean": ("default",),
            "eps": ("std_norm", "gdpo"),
            "components": ("gdpo",),
            "import_path": ("custom",),
            "kwargs": ("custom",),
        }
        for name, types in owners.items():
            if self.type not in types and getattr(self, name) != type(self).model_fields[name].default:
                allowed = " or ".join(f'"{owner}"' for owner in types)
                yield f'{name} applies to type {allowed}, got type "{self.type}"; remove it or change the type'
        if self.type == "gdpo" and not self.components:
            yield 'type "gdpo" needs components, e.g. components = { correct = 1.0, format = 0.5 }'
        for name, weight in self.components.items():
            if not 0 < abs(weight) <= _MAX_WEIGHT:
                yield f"components.{name} must be finite and not 0, at most {_MAX_WEIGHT:g} in size, got {weight}; remove it"
        if self.type == "custom" and self.import_path is None:
            yield 'type "custom" needs import_path, e.g. import_path = "my_package.my_module.my_function"'

    @property
    def needs_scores_and_turns(self) -> bool:
        """True if the advantage may depend on more of a rollout than its reward and the length of its completion."""
        return self.type in ("gdpo", "turns", "agents", "custom")

    @property
    def needs_a_group(self) -> bool:
        """True if the advantage of a rollout is computed from the other rollouts of its group too."""
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


class TeacherNameConfig(Section):
    """The teacher, as its server names it."""

    name: str
    """Name under which its server serves the teacher. Its tokenizer must be the policy's."""


class TeacherModelConfig(Section):
    """The teacher of on-policy distillation (trainer.loss.teacher_tau).

    It scores every finished group before the group can be trained on. A run with teacher_gpu_ids or [teacher_inference]
    starts its server and fills this section.
    """

    model: TeacherNameConfig
    client: ClientConfig = ClientConfig()
    max_concurrent: int = Field(default=64, ge=1, le=MAX_ROLLOUTS)
    """Samples that the teacher scores at one time, over all its servers."""

    def _problems(self) -> Iterator[str]:
        if self.client.elastic is not None:
            yield "client.elastic is for the policy's servers: name the teacher's in client.base_url"


class PolicyModelConfig(Section):
    """The policy, as the servers name it."""

    name: str = DEFAULT_MODEL
    """Name the server serves the model under; also where the tokenizer is read from."""


class ShownSamplesConfig(Section):
    """Rollouts that the console shows, so that you see what the model writes."""

    interval: int = Field(default=10, ge=1)
    """Steps from one showing to the next."""
    count: int = Field(default=1, ge=1)
    """Rollouts that are shown each time."""
    max_chars: int = Field(default=400, ge=20)
    """Prompt and completion are each cut to this many characters; whole ones are in rollouts/step_N/."""


class OrchestratorConfig(SteppingRoleConfig, EnvWorkersConfig):
    """`uv run orchestrator @ orchestrator.toml`."""

    seed: int = Field(default=42, ge=0)
    """Seeds the order of examples, unless buffer.seed does."""
    seq_len: int = Field(default=2048, ge=2, le=MAX_TOKENS)
    """Tokens of one packed row; longer samples are cut. At most the trainer's."""
    batch_size: int = Field(default=128, ge=1, le=MAX_ROLLOUTS)
    """Rollouts per step."""
    rollouts_per_example: int = Field(default=1, ge=1, le=MAX_ROLLOUTS)
    """Rollouts of one example, compared with each other. Divides batch_size."""
    oversampling_factor: float = Field(default=1.0, ge=1)
    """Rollouts in flight, as a multiple of batch_size."""
    max_async_level: int = Field(default=1, ge=0)
    """How many policies a new rollout may lag behind; 0 waits for each step."""
    strict_async_level: bool = False
    """Always lag exactly max_async_level, whatever the timing: more idle time. First batches of a resumed run lag less."""
    deterministic: bool = False
    """Form batches in the order of group ids, whatever the timing. The run's own key sets all that it needs."""
    max_off_policy_steps: int = Field(default=8, ge=0)
    """A group whose oldest token is older than this many steps is dropped; steps that it waited in queues count."""
    max_concurrent: int | None = Field(default=None, ge=1, le=MAX_ROLLOUTS)
    """Rollouts in flight at most, whatever the oversampling."""
    tasks_per_minute: int | None = Field(default=None, ge=1)
    """Rollouts started per minute at most, for environments that ask a service with a limit; unset: as fast as they go."""
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """`interleaved`: the turns of a rollout are one sample as long as each turn continues the tokens of the last; the server keeps
    the tokens of earlier turns wherever the chat template leaves their text as it was. `branching`: each turn is a sample."""
    mask_truncated_completions: bool = False
    """Train on no token of a rollout that was cut at a length limit; its reward stays in its group's baseline."""
    zero_truncated_completions: bool = False
    """Give a rollout that was cut at a length limit the reward 0, before its group is compared."""
    record_rollouts: bool = False
    """Keep trained rollouts in rollouts/step_N/groups.msgpack.z, for orchestrator.replay of another run."""
    replay: Path | None = None
    """Output directory of a run with record_rollouts: train on its rollouts, in order, without servers and environments."""
    reload_weights_on_start: bool = True
    """A run that starts from step 0 resets the servers to the start weights."""
    max_fruitless_batches: int = Field(default=10, ge=1)
    """Stop when this many batches' worth of groups in a row failed or carried no signal."""
    sleep_servers: bool = False
    """Have the servers sleep while the trainer learns. A run with inference.sleep_while_training sets it."""
    client: ClientConfig = ClientConfig()
    model: PolicyModelConfig = PolicyModelConfig()
    teacher_model: TeacherModelConfig | None = None
    sampling: SamplingConfig = SamplingConfig()
    env: list[EnvConfig] = Field(default=[EnvConfig()], min_length=1)
    """Environments to train on."""
    env_nodes: EnvNodesConfig | None = None
    """Environment workers on several nodes; unset: on this machine. A run over several nodes sets it."""
    buffer: BufferConfig = BufferConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    filters: FiltersConfig = FiltersConfig()
    rollout_transport: TransportConfig = TransportConfig()
    shown_samples: ShownSamplesConfig | None = ShownSamplesConfig()
    """None: no rollouts on the console."""
    eval: OnlineEvalConfig | None = None
    """Evaluate policies during the run; unset: no."""
    val: ValConfig | None = None
    """Validate on held-out examples during the run; unset: no."""

    @property
    def environments(self) -> dict[str, EnvConfig]:
        """The environments that the run loads, by the name of their workers: first those for training, then those for evaluation.

        A replay loads none, because its rollouts are scored already.
        """
        if self.replay is not None:
            return {}
        loaded: dict[str, EnvConfig] = {env.label: env for env in self.env}
        for env in self.eval.env if self.eval is not None else []:
            loaded.setdefault(self.pool_name(env), env)
        return loaded

    def pool_name(self, env: EnvConfig) -> str:
        """Return the name of the workers that evaluate on `env`: training workers with an equal program, else its own workers."""
        for trained in self.env:
            if trained.program == env.program:
                return trained.label
        return f"{env.label}-eval"
