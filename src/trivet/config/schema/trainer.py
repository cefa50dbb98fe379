"""Sections of the trainer, some of which supervised fine-tuning shares: optimizer, schedule and measurements."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from trivet.config.schema.base import MAX_ROLLOUTS, MAX_TOKENS, MAX_WAIT_S, Section, type_or
from trivet.config.schema.losses import DefaultLossConfig, LossConfig
from trivet.config.schema.model import TrainerModelConfig
from trivet.config.schema.shared import MetricsServerConfig, SteppingRoleConfig, TransportConfig


class BenchConfig(Section):
    """`--bench`: take a few optimizer steps on made-up rows of model.seq_len tokens and print what they cost.

    There are no orchestrator, servers, data or tokenizer; nothing is published and nothing is kept.
    """

    output_json: Path | None = None
    """File that gets the figures, with the configuration, versions and hardware that they belong to."""
    num_steps: int = Field(default=4, ge=2)
    """Optimizer steps. The first warms up and does not count."""
    rows_per_rank: int = Field(default=2, ge=1)
    """Rows of model.seq_len tokens per rank and step; the published figures of prime-rl have 2."""
    prompt_len: int = Field(default=0, ge=0)
    """Tokens of the prompt that each sample begins with. They are not trained on. 0: a sample is an answer alone."""
    answer_len: int | None = Field(default=None, ge=2)
    """Tokens of the answer that each sample ends with. A row has as many samples as fit. "None": a sample fills a row."""
    group_size: int = Field(default=1, ge=1)
    """Samples that begin with the same prompt, as the rollouts of a group do. With model.share_prefixes it is computed once."""


class CommonOptimizerConfig(Section):
    """Keys that every optimizer has."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Share of a parameter that each step removes, times the learning rate. With `sgd` it is part of the gradient instead."""
    max_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; None: do not clip."""


class AdamWConfig(CommonOptimizerConfig):
    """Adam with decoupled weight decay."""

    type: Literal["adamw"] = "adamw"
    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    betas2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""


class SGDConfig(CommonOptimizerConfig):
    """One number of state per parameter, none without momentum. Updates are as large as gradients: it needs a far higher lr."""

    type: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the momentum; 0: none, an update follows the gradient itself."""
    nesterov: bool = True
    """Look one update ahead. Needs momentum."""

    def _problems(self) -> Iterator[str]:
        if self.nesterov and not self.momentum:
            yield "nesterov looks ahead along the momentum, which is 0: set nesterov = false or momentum above 0"


class MuonConfig(CommonOptimizerConfig):
    """Orthogonalized momentum for the matrices of blocks; AdamW for embeddings, head, norms and stacks of experts.

    Updates of both are of like size, so that one lr serves both.
    """

    type: Literal["muon"] = "muon"
    mu: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the momentum of matrices."""
    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    betas2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's second moment."""


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[SGDConfig, Tag("sgd")] | Annotated[MuonConfig, Tag("muon")],
    Discriminator(type_or("adamw")),
]


class TokenizerConfig(Section):
    """The tokenizer, which is saved with the weights."""

    name: str | None = None
    """Defaults to the model's own tokenizer."""
    chat_template: str | None = None
    """Jinja template, or its file, saved with the weights and given to the run's server; unset: the tokenizer's own."""


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
    """The step from which the rate stays at min_lr. Unset: max_steps of the first start, which a resume keeps."""


class CosineSchedule(Section):
    """The learning rate rises to its peak in a straight line, then falls along half a cosine."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=10, ge=0)
    """Steps from 0 to the peak."""
    min_lr: float = Field(default=0.0, ge=0)
    """Rate at the end."""
    total_steps: int | None = Field(default=None, ge=1)
    """The step from which the rate stays at min_lr. Unset: max_steps of the first start, which a resume keeps."""


ScheduleConfig = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="type")]


class TrainingConfig(SteppingRoleConfig):
    """Keys that the trainer and `sft` share."""

    seed: int = Field(default=42, ge=0)
    """Seeds data order and initialisation."""
    model: TrainerModelConfig = TrainerModelConfig()
    micro_batch_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Tokens of a row computed at once; a longer sample has its own. Saves memory, changes no result. Unset: model.seq_len."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    optim: OptimizerConfig = AdamWConfig()
    scheduler: ScheduleConfig = ConstantSchedule()
    metrics_server: MetricsServerConfig | None = None
    memory_profiler_path: Path | None = None
    """Directory for a snapshot of CUDA memory after every step and rank, for pytorch.org/memory_viz. Costs time and disk."""
    trace_path: Path | None = None
    """Directory for traces of the third and fourth step, a file per rank, for ui.perfetto.dev. Needs at least 4 steps."""
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
    """Give GPU memory back before a policy can be read. A run with inference.sleep_while_training sets it."""


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
    """Output directory of a run that recorded its batches: `uv run trainer` trains on them again, without other roles."""
    fake: FakeBatchesConfig | None = None


class TrainerConfig(TrainingConfig):
    """`uv run trainer @ trainer.toml`."""

    data: TrainerDataConfig = TrainerDataConfig()
    loss: LossConfig = DefaultLossConfig()
    num_iterations: int = Field(default=1, ge=1)
    """Optimizer updates on each batch. Above 1 the later ones are off-policy, which the loss must bound (grpo, gspo)."""
    router_replay: bool = False
    """For a mixture of experts: compute each token with the experts that the server chose for it. The routers still learn. Costs a
    byte an expert, layer and token, compressed; samples without experts are refused."""
    rollout_transport: TransportConfig = TransportConfig()
    max_async_level: int = Field(default=1, ge=0)
    """How many policies the servers may lag behind; that many published weights are kept, besides what readers hold."""
