"""Sections of the command `eval`."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from trivet.backoff import backoff_s
from trivet.config.schema.base import MAX_ROLLOUTS, MAX_WAIT_S, Section
from trivet.config.schema.deployment import SlurmConfig
from trivet.config.schema.environment import EnvWorkersConfig, EvalEnvConfig, EvalSamplingConfig
from trivet.config.schema.inference import ClientConfig
from trivet.config.schema.shared import LogConfig, TrackingConfig, WandbConfig


class EvalClientConfig(ClientConfig):
    """The servers to evaluate on, and how to reach them."""

    endpoint: str | None = None
    """Name of a server in `endpoints_path`, instead of base_url."""
    wait_for_ready_timeout: float = Field(default=60.0, gt=0, le=MAX_WAIT_S)
    """Longest wait for a server that does not answer, seconds; raise it if the server starts at the same moment."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        is_addressed = self.base_url != ClientConfig().base_url or self.elastic is not None
        if self.endpoint is not None and is_addressed:
            yield f"endpoint ({self.endpoint!r}) and base_url (or elastic) both say where the server is; remove one"


class EvalModelConfig(Section):
    """The model that requests name."""

    name: str | None = None
    """Model to ask for. Unset: that of the run which wrote weights_dir, else what the server serves."""


class EvalRetryConfig(Section):
    """Repeats of an example that failed, after the three attempts at each rollout that infrastructure failed."""

    max_attempts: int = Field(default=3, ge=1)
    """Times that an example is run before it counts as failed."""
    wait_multiplier: float = Field(default=1.0, gt=0, le=MAX_WAIT_S)
    """The n-th pause is wait_multiplier * 2^(n-1), within the next two, seconds."""
    wait_min: float = Field(default=1.0, ge=0, le=MAX_WAIT_S)
    """Shortest pause, seconds."""
    wait_max: float = Field(default=60.0, ge=0, le=MAX_WAIT_S)
    """Longest pause, seconds."""
    reraise: bool = False
    """End the evaluation with the error of the first example that failed for good; false: count it and go on."""

    def pause_s(self, attempt: int) -> float:
        """Return the seconds to wait after the failed attempt `attempt`, counted from 1."""
        return backoff_s(attempt, first_s=self.wait_multiplier, min_s=self.wait_min, max_s=self.wait_max)


class EvalConfig(EnvWorkersConfig):
    """`uv run eval --client.base-url URL --weights-dir outputs/weights --env.id ID`."""

    client: EvalClientConfig = EvalClientConfig()
    endpoints_path: Path = Path("configs/endpoints.py")
    """Python file with a table ENDPOINTS, from which client.endpoint takes a server by name."""
    model: EvalModelConfig = EvalModelConfig()
    env: list[EvalEnvConfig] = []
    """Environments to measure on: `--env.id ID`, which may be repeated. Unset: those of the run that wrote weights_dir."""
    weights_dir: Path | None = None
    """Evaluate every `step_N` in it that is complete. The server must see the same directory."""
    steps: list[int] | None = None
    """Only these steps, e.g. `10,50,100`."""
    interval: int = Field(default=1, ge=1)
    """Only steps that are a multiple of this, unless `steps` names them."""
    eval_base: bool = True
    """Evaluate the start weights first."""
    watcher: bool = False
    """Go on with steps that are published later, until max_steps of the run that writes them, or the last of `steps`."""
    watcher_timeout: float = Field(default=3600.0, gt=0, le=MAX_WAIT_S)
    """`watcher` ends when nothing new was published for this long, seconds."""
    num_examples: int = Field(default=-1, ge=-1)
    """Examples per environment, from the first; -1 is all."""
    rollouts_per_example: int = Field(default=1, ge=1, le=MAX_ROLLOUTS)
    """Attempts at each example."""
    max_concurrent: int = Field(default=128, ge=1, le=MAX_ROLLOUTS)
    """Rollouts in flight."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    retry: EvalRetryConfig = EvalRetryConfig()
    output_dir: Path | None = None
    """Results go to evals/step_N/<env>/ in it; unset: the directory that holds weights_dir, else `outputs`."""
    resume_path: Path | None = None
    """Go on with an evaluation that was cut short: its output_dir, or a directory or file of results in it."""
    use_tqdm: bool = True
    """Progress bars on a terminal; elsewhere, or when false, a line now and then."""
    wandb: WandbConfig | None = None
    """Log the scores as `eval/<env>/…` at the step of each policy, to a W&B run of their own."""
    tracking: TrackingConfig = TrackingConfig()
    """The same for other trackers."""
    log: LogConfig = LogConfig()
    slurm: SlurmConfig | None = None
    """Set: the evaluation is submitted to SLURM. Unset: it runs here."""
