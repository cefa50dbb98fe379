"""Sections of the inference server."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from trivet.config.sections.addresses import Host
from trivet.config.sections.base import MAX_PROCESSES, MAX_ROLLOUTS, MAX_TOKENS, Section
from trivet.config.sections.lora import MAX_RANK
from trivet.config.sections.rope import RopeScalingConfig
from trivet.config.sections.shared import DEFAULT_MODEL, RoleConfig


class ServerConfig(Section):
    """The address of the server, and who may use it."""

    host: Host = "127.0.0.1"
    """Interface to listen on."""
    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port; the launcher replaces it by a free one if it is taken."""
    api_key: str | None = Field(default=None, min_length=1)
    """Bearer token that requests for completions must carry; unset: anyone who reaches the server may ask. A run's own
    orchestrator gets it; others read it from the variable that `client.api_key_var` names."""
    weight_dirs: list[Path] = []
    """Directories below which weights and adapters may be loaded from, besides `weights/` in output_dir."""


class InferenceModelConfig(Section):
    """The model that is served, and how it reads and writes conversations."""

    name: str = DEFAULT_MODEL
    """Hugging Face name or a directory."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Dtype of the served weights. `auto` is the trainer's compute dtype, chosen as `trainer.model.compute_dtype` says."""
    max_model_len: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Longest prompt plus completion, tokens; unset: the model's own limit."""
    enforce_eager: bool = False
    """No compilation: starts faster, generates slower."""
    trust_remote_code: bool = False
    """Run code that the model's repository ships."""
    enable_auto_tool_choice: bool = False
    """Let the model decide to call tools."""
    tool_call_parser: str | None = "hermes"
    """How tool calls are written by this model; used with enable_auto_tool_choice."""
    reasoning_parser: str | None = None
    """How thinking is marked by this model, e.g. `qwen3`."""
    rope_scaling: RopeScalingConfig | None = None
    """Other rotary positions than the model's own. A run takes them from trainer.model.rope_scaling, or the other way round."""
    chat_template: str | None = None
    """Jinja template that conversations are written with, or a file that holds it; unset: the tokenizer's own. A run takes it from
    trainer.tokenizer.chat_template."""


class ParallelConfig(Section):
    """The server's GPUs, divided into replicas."""

    tp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Tensor-parallel GPUs per replica."""
    dp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Replicas; the launcher sets GPUs / tp."""


class InferenceConfig(RoleConfig):
    """`uv run inference @ inference.toml`."""

    name: str = "inference"
    """Name of the server among the processes of its run, under which it reports; the launcher sets it."""
    is_teacher: bool = False
    """Set by the launcher: it serves the teacher, and reports as that."""
    server: ServerConfig = ServerConfig()
    model: InferenceModelConfig = InferenceModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of GPU memory for weights and KV cache."""
    sleep_while_training: bool = False
    """Free the GPU memory of weights and KV cache while the trainer learns, for a model that does not fit next to the trainer
    on one GPU. The weights wait in main memory. Needs max_async_level = 0: nothing is generated meanwhile."""
    cpu_kv_cache_gib: float = Field(default=1.0, gt=0, le=65536)
    """Size of the KV cache on a machine without a GPU, GiB."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=MAX_ROLLOUTS)
    """Sequences generated at one time; unset: vLLM's default."""
    enable_lora: bool = False
    """Serve adapters: published ones, and those of /load_lora_adapter. A run with trainer.model.lora sets it."""
    max_loras: int = Field(default=8, ge=1, le=MAX_ROLLOUTS)
    """Adapters that requests of one moment may use, the policy's included; each takes memory for its weights."""
    max_cpu_loras: int = Field(default=100, ge=1, le=MAX_ROLLOUTS)
    """Adapters that stay loaded; the one unused for longest is evicted."""
    max_lora_rank: int = Field(default=16, ge=1, le=MAX_RANK)
    """Largest rank of an adapter, rounded up to 1, 8, 16, 32, 64, 128, 256, 320 or 512. A run takes it from
    trainer.model.lora.rank."""
    seed: int = Field(default=0, ge=0)
    """Seeds sampling of requests that carry no seed."""
    deterministic: bool = False
    """One sequence at a time, and nothing computed for another request is reused: equal requests get equal bytes."""
    vllm_args: dict[str, Any] = {}
    """Further vLLM engine arguments by name, e.g. `{ swap_space = 4 }`; one that has a key above is refused."""
