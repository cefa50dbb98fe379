"""Sections of `[trainer.model]`: the model, its dtypes, adapters and positions. `sft` has the same sections."""

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trivet.config.schema.base import MAX_PROCESSES, MAX_TOKENS, Section
from trivet.config.schema.shared import DEFAULT_MODEL
from trivet.config.tables import as_table
from trivet.errors import ConfigError


class RopeScalingConfig(Section):
    """Stretch the model's positions, for contexts longer than those that it was trained on."""

    rope_type: Literal["linear", "yarn", "llama3"]
    """How positions are stretched. Types that depend on a request's length would differ between trainer and server."""
    factor: float = Field(gt=0)
    """How many times longer the context becomes."""
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    """The context that the model was trained on, tokens. `yarn` and `llama3` need it."""
    attention_factor: float | None = Field(default=None, gt=0)
    """For `yarn`: scale of the attention logits; unset: computed from the factor."""
    beta_fast: float | None = Field(default=None, gt=0)
    """For `yarn`: rotations within the original context above which a dimension stays as it is; unset: 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """For `yarn`: rotations below which a dimension is stretched by the whole factor; unset: 1."""
    low_freq_factor: float | None = Field(default=None, gt=0)
    """For `llama3`, which needs it: wavelengths above the original context over this are stretched by the whole factor."""
    high_freq_factor: float | None = Field(default=None, gt=0)
    """For `llama3`, which needs it: wavelengths below the original context over this stay as they are."""

    def _problems(self) -> Iterator[str]:
        needed = {
            "linear": (),
            "yarn": ("original_max_position_embeddings",),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        }[self.rope_type]
        if missing := [name for name in needed if getattr(self, name) is None]:
            yield f'rope_type "{self.rope_type}" needs {" and ".join(missing)}; set what is missing'

    def over(self, own: object, *, model: str) -> dict[str, object]:
        """Return the value of `rope_parameters` in config.json with this section's values.

        Args:
            own: the model's own value, which these values replace in part.
            model: the model's name, for the message.

        Raises a ConfigError if the model has no rotary positions that all its layers share.
        """
        parameters = as_table(own)
        if parameters is None or "rope_theta" not in parameters:
            raise ConfigError(
                f"model.rope_scaling does not apply: {model} has no rotary positions that all its layers share; remove it"
            )
        return {**parameters, **self.model_dump(exclude_none=True)}


MAX_RANK = 512
"""The largest rank of an adapter that vLLM can serve."""


class LoRAConfig(Section):
    """Low-rank matrices beside frozen weights; what is published is they alone, in PEFT's format."""

    rank: int = Field(default=16, ge=1, le=MAX_RANK)
    """Inner dimension of each adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are zeroed in training. Above 0 the loss depends on how rows are packed."""
    target_modules: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Linear modules that get an adapter: the last part or parts of their names, or a regular expression for the whole name."""
    modules_to_save: list[str] = []
    """Modules that are trained whole and saved with the adapter, by name, e.g. ["norm"]. Servers cannot load them: for `sft`."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that large ranks learn as fast as small ones."""

    def _problems(self) -> Iterator[str]:
        if not self.target_modules:
            yield 'target_modules must name at least one module, e.g. ["q_proj", "v_proj"]'
        for target in self.target_modules:
            try:
                re.compile(target)
            except re.error as exc:
                yield f"target_modules: {target!r} is neither a name nor a regular expression: {exc}"


Dtype = Literal["bfloat16", "float32"]
ComputeDtype = Literal["auto", "bfloat16", "float32"]


class ActivationCheckpointConfig(Section):
    """Compute a block again in the backward pass instead of keeping what it computed: more time, less memory."""

    mode: Literal["full", "selective"] = "full"
    """Parts of a block that are computed again: all, or those that `targets` names."""
    freq: int = Field(default=1, ge=1)
    """One of this many blocks is checkpointed; 1: every block."""
    targets: list[str] = ["norm"]
    """Parts for mode `selective`: `norm`, `attn`, `mlp`, or names of a block's modules. Norms keep the most for the least work."""
    keep: list[Literal["attention", "products"]] = []
    """Outputs that are kept: `attention` costs 2 bytes per token and feature, `products` (of matrices) the most memory."""

    def _problems(self) -> Iterator[str]:
        if self.mode == "selective" and not self.targets:
            yield 'targets must name at least one part of a block, e.g. ["norm", "mlp"]'
        if self.mode == "full" and self.targets != ["norm"]:
            yield 'targets are for mode = "selective": "full" computes whole blocks again'


class ActivationOffloadConfig(Section):
    """Keep in main memory, not on the GPU, the inputs from which checkpointed blocks are computed again.

    Needs `ac`. On the CPU it does nothing, because they are there already.
    """

    pin_memory: bool = True
    """Use page-locked memory, which is copied to and from while the GPU computes."""
    max_inflight_activations: int = Field(default=5, ge=1)
    """Activations whose copies may be under way; more hide more of the copying, and keep more on the GPU."""


class CompileConfig(Section):
    """Compile each block, and what follows the head's products, with torch.compile, for rows of any length."""

    fullgraph: bool = False
    """Only `false`: attention stays outside the graphs. It loops over a row's samples, so each new row would compile anew."""

    def _problems(self) -> Iterator[str]:
        if self.fullgraph:
            yield (
                "fullgraph = true cannot be used: most attentions loop over the samples of each row and stay outside of what is "
                "compiled, so a block is one graph with flash_varlen alone; remove fullgraph, and all that can be is compiled"
            )


class DebugModelConfig(Section):
    """Changes to the model, for tests and measurements with `sft` or a replay."""

    num_layers: int | None = Field(default=None, ge=1)
    """Keep only this many layers, from the first."""
    random_init: bool = False
    """Draw the weights from the seed instead of reading them."""


class TrainerModelConfig(Section):
    """The model that is trained."""

    name: str = DEFAULT_MODEL
    """Hugging Face name or a directory."""
    seq_len: int = Field(default=2048, ge=2, le=MAX_TOKENS)
    """Tokens of one packed row; longer samples are cut."""
    share_prefixes: bool = True
    """Compute common prefixes of samples once, such as the prompt of a group. Results are equal up to rounding."""
    attn: Literal["auto", "sdpa", "flash_varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"] = "auto"
    """Attention over packed rows. On CUDA `flash_varlen` or `flash_attention_2` (torch's own); where those packages are installed
    `flash_attention_3` (compute capability 9.0) and `flash_attention_4` (9.0 and 10.0). `sdpa` (sample by sample) runs anywhere.
    `auto` takes the fastest that can: a package's only where it agrees with torch's own on a small row at the start. Models whose
    rows hold one sample each keep transformers' own attention."""
    compute_dtype: ComputeDtype = "auto"
    """Dtype of forward and backward. `auto`: bfloat16 where the device multiplies in it, else float32; a run chooses once."""
    optimization_dtype: Dtype = "float32"
    """Dtype of the master weights and the optimizer state."""
    dither: bool = True
    """Add noise to each start weight, with bfloat16 compute over float32 master weights. The noise is less than half of bfloat16's
    spacing, so the start model is bit for bit the same. Small updates then reach the model that computes. Without noise, updates at
    a small learning rate must first add up for tens of steps."""
    reduce_dtype: Dtype = "float32"
    """Dtype of gradient reduction over ranks."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward: less memory, one more gather."""
    reduce_each_row: bool = True
    """Reduce gradients over ranks after each row. `false`: once a step, with whole gradients in the memory of each rank."""
    fused_lm_head_chunk_size: int = Field(default=2048, ge=1, le=MAX_TOKENS)
    """Tokens whose logits exist at one time."""
    trust_remote_code: bool = False
    """Run code that the model's repository ships."""
    rope_scaling: RopeScalingConfig | None = None
    """Other rotary positions than the model's, saved with the weights. A run gives its server the same."""
    lora: LoRAConfig | None = None
    """Train adapters instead of all weights."""
    ac: ActivationCheckpointConfig | None = None
    ac_offloading: ActivationOffloadConfig | None = None
    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in main memory. The optimizer runs on the CPU."""
    optim_cpu_offload: bool = False
    """Keep the optimizer's state alone in main memory; it comes to the GPU part by part for the update."""
    dp_replicate: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Copies of the model, each sharded over ranks / dp_replicate ranks: less traffic between nodes, more memory."""
    cp: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Consecutive ranks that compute a row together, each a slice of it: activations of long rows take 1 / cp of the memory."""
    ep: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Consecutive ranks that hold the experts of a mixture in parts: tokens travel to them, experts are not gathered whole."""
    experts_implementation: Literal["auto", "grouped_mm", "batched_mm", "eager"] = "auto"
    """How a mixture's experts are multiplied. `auto`: grouped products where torch has them, else a loop (`eager`). Measured on a
    CPU, grouped products are up to 25 times as fast as the loop; `batched_mm` copies the matrices of every choice."""
    cp_style: Literal["ulysses"] = "ulysses"
    """How they exchange keys and values: slices for heads, so cp must divide the attention heads."""
    compile: CompileConfig | None = None
    debug: DebugModelConfig = DebugModelConfig()

    def _problems(self) -> Iterator[str]:
        if self.lora is not None and self.rope_scaling is not None:
            yield (
                "rope_scaling is saved in config.json, which adapters do not have: whoever loads one would compute with the"
                " base model's positions; change rope_parameters in config.json of the base model instead, or train all weights"
            )
        if self.ac_offloading is not None and self.ac is None:
            yield ("ac_offloading keeps what checkpointed blocks start from: add ac, e.g. [trainer.model.ac] freq = 1")
        if self.ep > 1 and self.dp_replicate > 1:
            yield f"ep ({self.ep}) distributes experts of one copy, and dp_replicate is {self.dp_replicate}; set one to 1"
        if self.ep > 1 and self.lora is not None:
            yield f"ep ({self.ep}) distributes trained experts, and an adapter leaves experts as they are; remove ep"
        if self.fsdp_cpu_offload and self.optim_cpu_offload:
            yield ("fsdp_cpu_offload keeps the optimizer's state in main memory too: set it or optim_cpu_offload, not both")
