"""Sections of the trainer, and what supervised fine-tuning shares with it: model, optimizer and schedule."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trivet.config.sections.base import MAX_ROLLOUTS, MAX_TOKENS, MAX_WAIT_S, Section
from trivet.config.sections.bench import BenchConfig
from trivet.config.sections.losses import DefaultLossConfig, LossConfig
from trivet.config.sections.model import TrainerModelConfig
from trivet.config.sections.optimizer import AdamWConfig, OptimizerConfig
from trivet.config.sections.shared import MetricsServerConfig, SteppingRoleConfig, TransportConfig


class TokenizerConfig(Section):
    """The tokenizer, which is saved with the weights."""

    name: str | None = None
    """Defaults to the model's own tokenizer."""
    chat_template: str | None = None
    """Jinja template that conversations are written with, or a file that holds it. It is saved with the weights. A run gives its
    server the same, inference.model.chat_template; unset: the tokenizer's own."""


class ConstantSchedule(Section):
    """The learning rate stays at its peak."""

    type: Literal["constant"] = "constant"


class LinearSchedule(Section):
    """The learning rate rises to its peak and falls at the end, both in straight lines."""

    type: Literal["linear"] = "linear"
    warmup_steps: int = Field(default=10, ge=0)
    """Steps from 0 to the peak."""
    decay_steps: int = Field(default=10, ge=0)
    """Last steps over which the rate falls to min_lr."""
    min_lr: float = Field(default=0.0, ge=0)
    """Rate at the end."""
    total_steps: int | None = Field(default=None, ge=1)
    """The step at which the rate reaches min_lr, and where it stays. Unset: max_steps of the first start; a resume with another
    max_steps keeps it."""


class CosineSchedule(Section):
    """The learning rate rises to its peak in a straight line, then falls along half a cosine."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=10, ge=0)
    """Steps from 0 to the peak."""
    min_lr: float = Field(default=0.0, ge=0)
    """Rate at the end."""
    total_steps: int | None = Field(default=None, ge=1)
    """The step at which the rate reaches min_lr, and where it stays. Unset: max_steps of the first start; a resume with another
    max_steps keeps it."""


ScheduleConfig = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="type")]


class TrainingConfig(SteppingRoleConfig):
    """Keys that the trainer and `sft` share."""

    seed: int = Field(default=42, ge=0)
    """Seeds data order and initialisation."""
    model: TrainerModelConfig = TrainerModelConfig()
    micro_batch_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Tokens of a row that is computed at once: the batch's samples are packed anew into rows of at most so many, a longer sample
    gets a row of its own. Less needs less memory, and changes no result. Unset: rows as they come, of at most model.seq_len."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    optim: OptimizerConfig = AdamWConfig()
    scheduler: ScheduleConfig = ConstantSchedule()
    metrics_server: MetricsServerConfig | None = None
    memory_profiler_path: Path | None = None
    """Directory that gets a snapshot of the GPU's memory after every step, a file per rank, for pytorch.org/memory_viz. CUDA
    only. Costs time and disk: for runs of a few steps."""
    trace_path: Path | None = None
    """Directory that gets a trace of the third and fourth step of this start, a file per rank, for chrome://tracing or
    ui.perfetto.dev. The steps before warm up; at least 4 steps are needed."""
    bench: BenchConfig | None = None
    dist_timeout_seconds: int = Field(default=600, ge=1, le=MAX_WAIT_S)
    """Longest wait in a collective operation before the rank gives up."""
    deterministic: bool = False
    """The same bytes from the same batches, on the same machine and number of ranks. The run's own key sets it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA when there is a GPU."""
    gpu_memory_utilization: float = Field(default=1.0, gt=0, le=1)
    """Largest share of a GPU's memory that a rank may take. A run lowers it to what the servers on the same GPU leave."""
    release_gpu_memory: bool = False
    """Before a step's policy can be read, drop the gradients and give the GPU memory that is no longer needed back to the driver. A
    run with inference.sleep_while_training sets it."""


class FakeBatchesConfig(Section):
    """Made-up batches: a run of the trainer by itself, with all that it writes and without orchestrator and servers."""

    batch_size: int = Field(default=2, ge=1, le=MAX_ROLLOUTS)
    """Rows of model.seq_len tokens per step."""
    generate_samples: bool = False
    """Cut each row into samples of many lengths; false: one sample fills a row."""


class TrainerDataConfig(Section):
    """Other sources of batches than an orchestrator, and whether batches are kept."""

    record: bool = False
    """Keep every batch in batches/step_N.msgpack: a few bytes per token and number, in all some MB a step."""
    replay: Path | None = None
    """Output directory of a run that recorded its batches: `uv run trainer` trains on them again, without orchestrator and
    servers. Its own output_dir must be another."""
    fake: FakeBatchesConfig | None = None


class TrainerConfig(TrainingConfig):
    """`uv run trainer @ trainer.toml`."""

    data: TrainerDataConfig = TrainerDataConfig()
    loss: LossConfig = DefaultLossConfig()
    num_iterations: int = Field(default=1, ge=1)
    """Optimizer updates on each batch. Above 1 the later ones are off-policy, which the loss must bound (grpo, gspo)."""
    rollout_transport: TransportConfig = TransportConfig()
    max_async_level: int = Field(default=1, ge=0)
    """How many policies the servers may lag behind; that many published weights are kept, besides what readers hold."""
