"""The configuration of a whole run, which the command `rl` reads. `config.resolve` copies shared values to the roles' sections."""

from pathlib import Path

from pydantic import Field

from trivet.config.schema.base import MAX_PROCESSES, MAX_TOKENS, MAX_WAIT_S, Section
from trivet.config.schema.deployment import DeploymentConfig, KubernetesConfig, RecoveryConfig, SkyPilotConfig, SlurmConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import (
    DEFAULT_MODEL,
    DEFAULT_OUTPUT_DIR,
    CkptConfig,
    DetectorsConfig,
    FaultsConfig,
    LogConfig,
    TrackingConfig,
    WandbConfig,
    WeightsConfig,
)
from trivet.config.schema.trainer import BenchConfig, TrainerConfig


class SharedModelConfig(Section):
    """The model of the run, for every role."""

    name: str = DEFAULT_MODEL
    """Hugging Face name or a directory: the model that every role uses."""


class RLConfig(Section):
    """`uv run rl @ config.toml`."""

    output_dir: Path = DEFAULT_OUTPUT_DIR
    """Root of everything the run writes."""
    clean: bool = False
    """Remove what an earlier run left in output_dir before starting."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many steps."""
    seq_len: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Fills trainer.model.seq_len and orchestrator.seq_len."""
    max_model_len: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Fills inference.model.max_model_len."""
    max_async_level: int | None = Field(default=None, ge=0)
    """Fills trainer.max_async_level and orchestrator.max_async_level."""
    deterministic: bool = False
    """Two runs give the same bytes, killed and resumed ones too: float32 on a CPU, one sequence at a time. Slow; for proofs."""
    seed: int | None = Field(default=None, ge=0)
    """Fills every role's seed."""
    inference_gpu_ids: list[int] = [0]
    """GPUs of the inference server. May overlap trainer_gpu_ids; ignored on a machine without a GPU."""
    teacher_gpu_ids: list[int] | None = None
    """GPUs of a teacher's server, which the launcher then starts; unset with [teacher_inference] unset: it starts none."""
    trainer_gpu_ids: list[int] = [1]
    """GPUs of the trainer, one rank each."""
    trainer_cpu_ranks: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Trainer ranks on a machine without a GPU."""
    model: SharedModelConfig = SharedModelConfig()
    wandb: WandbConfig | None = None
    """Shared by trainer and orchestrator."""
    tracking: TrackingConfig = TrackingConfig()
    """Shared by trainer and orchestrator."""
    log: LogConfig = LogConfig()
    """Shared by trainer, orchestrator and launcher."""
    detectors: DetectorsConfig = DetectorsConfig()
    """Shared by trainer and orchestrator."""
    ckpt: CkptConfig = CkptConfig()
    """Shared by trainer and orchestrator."""
    weights: WeightsConfig = WeightsConfig()
    """Shared by trainer and orchestrator."""
    recovery: RecoveryConfig = RecoveryConfig()
    """The launcher's reaction to a role that ends or hangs."""
    bench: BenchConfig | None = None
    """Fills trainer.bench: the trainer alone is measured, on trainer_gpu_ids."""
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: InferenceConfig | None = InferenceConfig()
    """None: the servers of orchestrator.client.base_url are started by someone else."""
    teacher_inference: InferenceConfig | None = None
    """The server of orchestrator.teacher_model, started beside the others: the keys of [inference]. Its weights never change."""
    faults: FaultsConfig = FaultsConfig()
    """Shared by every role."""
    deployment: DeploymentConfig = DeploymentConfig()
    """The nodes of the run."""
    kubernetes: KubernetesConfig | None = None
    """Set: a Kubernetes manifest is written, and nothing runs here."""
    skypilot: SkyPilotConfig | None = None
    """Set: a task of SkyPilot is written, and nothing runs here."""
    slurm: SlurmConfig | None = None
    """Set: the run is submitted to SLURM. Unset: it runs here."""
    shutdown_timeout_s: float = Field(default=20.0, gt=0, le=MAX_WAIT_S)
    """Time between the request to stop and the kill."""
