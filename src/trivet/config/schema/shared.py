"""Sections and keys that several roles share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from trivet.config.schema.base import MAX_WAIT_S, Host, Section, WebAddress

Reaction = Literal["warn", "stop", "off"]


class DetectorsConfig(Section):
    """Each detector warns, stops the run with exit code 3, or is off."""

    equal_rewards: Reaction = "warn"
    """Every rollout of a batch has the same reward."""
    zero_advantages: Reaction = "warn"
    """No group of a batch has rollouts of different reward."""
    failed_rollouts: Reaction = "warn"
    """At least failed_share of the groups failed."""
    truncated: Reaction = "warn"
    """At least truncated_share of the rollouts were cut off."""
    entropy_collapse: Reaction = "warn"
    """Entropy fell below entropy_share of its level in the first five steps."""
    mismatch_drift: Reaction = "warn"
    """The mismatch KL between trainer and server exceeds mismatch_kl."""
    gradient_spike: Reaction = "warn"
    """The gradient norm is gradient_factor times its median of the last 20 steps. Reports at once."""
    stuck_policy: Reaction = "warn"
    """The servers held one policy over stuck_policy_steps batches."""
    no_loss_tokens: Reaction = "warn"
    """A batch has nothing to train on. Reports at once."""
    patience: int = Field(default=3, ge=1)
    """Steps in a row before a detector reports, unless it reports at once: one bad batch may be chance."""
    failed_share: float = Field(default=0.5, gt=0, le=1)
    """Share of failed groups at which `failed_rollouts` reports. When half of them fail, the environment is the likely cause."""
    truncated_share: float = Field(default=0.5, gt=0, le=1)
    """Share of rollouts that were cut at which `truncated` reports. Such a rollout is rewarded for its beginning alone."""
    entropy_share: float = Field(default=0.02, gt=0, lt=1)
    """Share of the first entropy below which `entropy_collapse` reports. Learning lowers it; a fiftieth explores nothing."""
    mismatch_kl: float = Field(default=0.1, gt=0)
    """KL divergence above which `mismatch_drift` reports, nats per token. Healthy runs of full fine-tuning stay below 0.01."""
    gradient_factor: float = Field(default=20.0, gt=1)
    """Multiple of the median at which `gradient_spike` reports. With small batches the norm varies by a factor of a few."""
    stuck_policy_steps: int = Field(default=10, ge=2)
    """Batches with one policy at which `stuck_policy` reports: more than any usual max_async_level."""


class LogConfig(Section):
    """Which log lines are written, and in which form."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is written."""
    json_logging: bool = False
    """Write each log line as a JSON object: level, time, role, logger, message, error. Libraries' own prints stay."""


class LogExtrasConfig(Section):
    """Tables and histograms that the orchestrator logs to W&B in addition to numbers."""

    samples: bool = True
    """A table of rollouts: prompt, completion, reward, advantage."""
    distributions: bool = True
    """Histograms of rewards, advantages and completion lengths."""
    interval: int = Field(default=10, ge=1)
    """Steps between them: tables are slow to draw."""
    max_samples: int = Field(default=8, ge=1)
    """Rollouts per table."""


class WandbConfig(Section):
    """Logging to Weights & Biases."""

    project: str = "trivet"
    """W&B project."""
    name: str | None = None
    """Run name; W&B makes one up when unset. Both roles log to one shared run."""
    offline: bool = False
    """Write to disk only; `wandb sync` uploads it later."""
    log_extras: LogExtrasConfig | None = LogExtrasConfig()
    """None: numbers only."""


class TensorBoardConfig(Section):
    """Event files for TensorBoard in `tensorboard/<role>/` of output_dir. Needs the extra `tensorboard`."""

    flush_s: float = Field(default=10.0, gt=0, le=MAX_WAIT_S)
    """Seconds after which numbers are in the file at the latest: TensorBoard shows a run while it goes on."""


class TrackioConfig(Section):
    """Logging to trackio: its local database, or a server. Needs the extra `trackio`."""

    project: str = "trivet"
    """trackio's project."""
    name: str | None = None
    """Run name, before the role's name; unset: the run's id. A resumed run goes on in it."""
    space_id: str | None = None
    """Space of Hugging Face, such as `user/space`, that shows the numbers; unset: nothing leaves this machine."""
    server_url: WebAddress | None = None
    """A trackio server of your own; the variable TRACKIO_WRITE_TOKEN holds its token."""


class MlflowConfig(Section):
    """Logging to MLflow: one of its runs for each role, which a resumed run goes on in. Needs the extra `mlflow`."""

    experiment: str = "trivet"
    """MLflow's experiment. It is made if it does not exist."""
    name: str | None = None
    """Run name, before the role's name; unset: the run's id."""
    tracking_uri: str | None = None
    """Address of a server; unset: files in `mlruns/` of output_dir. Variables such as MLFLOW_TRACKING_TOKEN hold its login."""


class OpenTelemetryConfig(Section):
    """Spans and metrics of each step for a collector, by OTLP over HTTP. Needs the extra `opentelemetry`."""

    endpoint: WebAddress = "http://127.0.0.1:4318"
    """Address of the collector, without `/v1/traces`. The variable OTEL_EXPORTER_OTLP_HEADERS holds its login."""
    service_name: str = "trivet"
    """Attribute `service.name`, by which collectors group what they get."""


class TrackingConfig(Section):
    """Trackers that get the run's metrics besides `metrics/` and W&B, under the same names as W&B."""

    tensorboard: TensorBoardConfig | None = None
    trackio: TrackioConfig | None = None
    mlflow: MlflowConfig | None = None
    opentelemetry: OpenTelemetryConfig | None = None


class HeartbeatConfig(Section):
    """Requests that tell a monitoring service that the run goes on."""

    url: WebAddress
    """Address that gets a GET request after every step. The service raises an alarm when the requests stop."""


class MetricsServerConfig(Section):
    """Gauges for Prometheus under /metrics, and /health, served by the main rank."""

    port: int = Field(default=8010, ge=0, le=65535)
    """TCP port; 0 takes a free one, which the log names. Not prime-rl's 8000, which is the inference server's here."""
    host: Host = "127.0.0.1"
    """Interface to listen on; `0.0.0.0` lets a Prometheus on another machine ask. Anyone who reaches it may read."""


class CkptWeightsConfig(Section):
    """The policies in weights/: one for each step that the servers need, and those that stay."""

    interval: int | None = Field(default=None, ge=1)
    """Keep weights/step_N of every multiple of this for ever, besides those that checkpoints and servers need."""
    save_sharded: bool = True
    """Split the weights into files of at most 5 GB; false: one file, whatever its size."""
    save_format: Literal["safetensors"] = "safetensors"
    """The only format: torch's own runs code when it is loaded."""

    @field_validator("save_format", mode="before")
    @classmethod
    def _refuse_torch_format(cls, value: object) -> object:
        if value == "torch":
            raise ValueError(
                'the format "torch" runs code when it is loaded, and servers load nothing of that kind; remove the key. For a'
                " pytorch_model.bin load weights/step_N in transformers, and torch.save its state_dict()"
            )
        return value


class CkptConfig(Section):
    """Checkpoints: when they are written, which are kept, and from which the run resumes."""

    interval: int | None = Field(default=None, ge=1)
    """Commit a checkpoint every this many steps; unset: only after the last step."""
    resume_step: int | None = Field(default=None, ge=-1)
    """Start from the checkpoint of this step; -1 takes the newest committed one."""
    resume_from: Path | None = None
    """Output directory of another run, which stays as it is: start from its `resume_step` (unset: newest), with any keys."""
    allow_changes: list[str] = []
    """Keys that may differ from the checkpoint's, e.g. ["optim.lr"]; ["*"]: any. Paths, ports, limits and logs always may."""
    keep_last: int | None = Field(default=None, ge=1)
    """Keep this many of the newest checkpoints; unset with keep_interval unset: keep all."""
    keep_interval: int | None = Field(default=None, ge=1)
    """Keep the checkpoints of every multiple of this for ever, besides keep_last."""
    async_write: bool = True
    """Write policies and checkpoints from copies while the next step runs; false: the step waits for the disk."""
    weights: CkptWeightsConfig = CkptWeightsConfig()
    skip_progress: bool = False
    """On resume: totals of tokens, samples and problems start at 0 again. Steps go on."""
    skip_scheduler: bool = False
    """On resume: the learning-rate schedule starts anew, as if the first step were the next."""
    skip_optimizer: bool = False
    """On resume: the optimizer starts without moments of earlier steps."""
    skip_dataloader: bool = False
    """On resume: `sft` reads its data from the beginning. In a run with rollouts, skip_buffer is what starts the data anew."""
    skip_buffer: bool = False
    """On resume: finished groups that wait for a batch and groups that were in flight are dropped, with this reason."""

    def is_due(self, step: int, *, max_steps: int | None) -> bool:
        """Return whether the run commits a checkpoint of `step`."""
        return step == max_steps or (self.interval is not None and step % self.interval == 0)


class OriginConfig(Section):
    """The origin: the process next to the trainer from which servers fetch policies, with `weights.transport = "http"`."""

    host: Host = "127.0.0.1"
    """Interface to listen on. Another interface's address lets servers on other machines connect; they need the run's secret."""
    advertise: Host | None = None
    """The address at which servers reach the origin, where that is another; unset: host."""
    port: int = Field(default=5556, ge=1, le=65535)
    """TCP port; the launcher replaces it by a free one if it is taken."""
    max_transfers: int = Field(default=2, ge=1)
    """Files that are sent at a time. With few, the first servers have the policy soon and pass it on; others ask them or wait."""

    @property
    def url(self) -> str:
        """The address at which servers reach the origin."""
        return self.model_copy(update={"host": self.advertise}).local_url if self.advertise is not None else self.local_url

    @property
    def local_url(self) -> str:
        """The address at which the launcher reaches the origin on its own machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


WeightsTransport = Literal["files", "http", "nccl", "gloo"]
IN_MEMORY: tuple[WeightsTransport, ...] = ("nccl", "gloo")
"""The ways that send a policy from the trainer's memory."""


class WeightsConfig(Section):
    """How policies reach the servers, and how they are proven on their way."""

    transport: WeightsTransport = "files"
    """`files`: servers read `weights/`, at the same path on every machine. `http`: each machine fetches a policy from the origin or
    from another server while its servers still generate; no shared directory is needed. `nccl`, `gloo`: the trainer sends it into
    the main memory of each server's workers, which need it for one more copy of the policy, while they still generate: by NCCL
    between GPUs or else by gloo, unencrypted; who misses it reads `weights/`."""
    origin: OriginConfig = OriginConfig()
    transfer_timeout: float = Field(default=30.0, gt=0, le=MAX_WAIT_S)
    """nccl and gloo: longest wait for the other ranks, to connect and for each 64 MiB of weights, seconds. Servers generate
    meanwhile."""

    probe_tokens: int = Field(default=64, ge=0, le=4096)
    """Tokens whose log-probabilities a server must reproduce before it serves a policy. 0: nothing is compared."""
    delta: bool = False
    """Publish with each policy what changed since the one before it, so that a server with that one need not fetch the whole. Needs
    transport "http". It is left out where it would have more than 60 % of the policy's bytes."""
    anchor_interval: int = Field(default=50, ge=1)
    """Policies of every multiple of this get no delta, so that servers fetch them whole. The first policy after a start or a resume
    gets none either."""

    def _problems(self) -> Iterator[str]:
        if self.delta and self.transport != "http":
            yield 'delta is for transport = "http": servers that read weights/ keep no earlier policy to apply it to; remove it'

    @property
    def origin_url(self) -> str | None:
        """The address from which servers fetch policies; None if they read `weights/`."""
        return self.origin.url if self.transport == "http" else None


class TransportConfig(Section):
    """ZeroMQ between orchestrator and trainer. The trainer listens, the orchestrator connects."""

    host: Host = "127.0.0.1"
    """Address on which the trainer listens. Another interface's address lets roles on other machines connect."""
    advertise: Host | None = None
    """The address at which the orchestrator reaches the trainer, where that is another; unset: host."""
    port: int = Field(default=5555, ge=1, le=65535)
    """TCP port; the launcher replaces it by a free one if it is taken."""
    max_message_mib: int = Field(default=512, ge=1)
    """A larger batch is refused before it is sent."""
    resend_interval_s: float = Field(default=5.0, gt=0, le=MAX_WAIT_S)
    """A batch is sent again after this long without an acknowledgement."""
    timeout_s: float = Field(default=1800.0, gt=0, le=MAX_WAIT_S)
    """Longest wait for the other role (for a batch in the trainer, for an acknowledgement in the orchestrator), seconds."""

    @property
    def is_between_machines(self) -> bool:
        """True if trainer and orchestrator may be on different machines. The launcher then sets `advertise`."""
        return self.advertise is not None


class RunIdentity(Section):
    """Set by the launcher; roles started by hand on several machines need the same values."""

    id: str = "local"
    """Messages of another run are refused."""
    attempt: int = Field(default=1, ge=1)
    """Counts the starts of this run, resumes included."""


class FaultsConfig(Section):
    """Faults that are injected on purpose, for tests."""

    schedule: Path | None = None
    """For tests of endurance: JSON file of faults that happen to this run, each once; scripts/chaos.py writes such files."""


DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DEFAULT_OUTPUT_DIR = Path("outputs")


class RoleConfig(Section):
    """Keys that every role has."""

    run: RunIdentity = RunIdentity()
    output_dir: Path = DEFAULT_OUTPUT_DIR
    """Root of everything the run writes."""
    faults: FaultsConfig = FaultsConfig()
    log: LogConfig = LogConfig()


class SteppingRoleConfig(RoleConfig):
    """Keys of the roles that count steps: the trainer, supervised fine-tuning and the orchestrator."""

    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps, each of one batch."""
    ckpt: CkptConfig = CkptConfig()
    weights: WeightsConfig = WeightsConfig()
    wandb: WandbConfig | None = None
    tracking: TrackingConfig = TrackingConfig()
    heartbeat: HeartbeatConfig | None = None
    detectors: DetectorsConfig = DetectorsConfig()
