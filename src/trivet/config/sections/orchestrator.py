"""Sections of the orchestrator."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from trivet.config.sections.base import MAX_ROLLOUTS, MAX_TOKENS, Section
from trivet.config.sections.client import ClientConfig, ConcurrencyConfig
from trivet.config.sections.curriculum import AdvantageConfig, BufferConfig, FiltersConfig
from trivet.config.sections.environment import EnvConfig, EnvNodesConfig, EnvWorkersConfig
from trivet.config.sections.online_eval import OnlineEvalConfig, ValConfig
from trivet.config.sections.sampling import SamplingConfig
from trivet.config.sections.shared import DEFAULT_MODEL, SteppingRoleConfig, TransportConfig
from trivet.config.sections.teacher import TeacherModelConfig


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
    """Always lag exactly max_async_level: independent of timing, more idle time. A resumed run starts from the policy that it
    resumes, so its first batches lag less."""
    deterministic: bool = False
    """Form batches in the order of group ids, whatever the timing. Needs strict_async_level, a seed for sampling and no
    oversampling. The run's own key sets all of it for every role."""
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
    """Keep the tokens and log-probabilities of trained rollouts in rollouts/step_N/groups.msgpack.z, for orchestrator.replay of
    another run: about as many bytes as a recorded batch."""
    replay: Path | None = None
    """Output directory of a run with record_rollouts: train on its rollouts, once and in their order, instead of sampling. No
    inference server and no environment is started. Its own output_dir must be another."""
    reload_weights_on_start: bool = True
    """A run that starts from step 0 resets the servers to the start weights."""
    max_fruitless_batches: int = Field(default=10, ge=1)
    """Stop when this many batches' worth of groups in a row failed or carried no signal."""
    sleep_servers: bool = False
    """Have the servers free their GPU memory before a batch is sent. They take it again when they load the policy that the batch
    leads to. They must have been started with inference.sleep_while_training; a run that starts them so sets this key."""
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
        """Every environment that the run loads, by the name of its workers: those trained on, then others to evaluate on.

        A replay loads none: its rollouts are scored.
        """
        if self.replay is not None:
            return {}
        loaded: dict[str, EnvConfig] = {env.label: env for env in self.env}
        for env in self.eval.env if self.eval is not None else []:
            loaded.setdefault(self.pool_name(env), env)
        return loaded

    def pool_name(self, env: EnvConfig) -> str:
        """Return the name of the workers that evaluate on `env`: those that train on it, or their own."""
        for trained in self.env:
            if trained.program == env.program:
                return trained.label
        return f"{env.label}-eval"
