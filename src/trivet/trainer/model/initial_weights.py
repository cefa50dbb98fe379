"""Loads the start model so that no rank ever holds all of it.

Called by `trainer.model.policy_model`: `build` makes a model without memory, the caller shards it, and `fill` gives each rank the
weights of its shards. Rows are here those of a weight, along its first dimension.
"""

import logging
import re
from collections.abc import Collection
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from trivet.config.schema.model import TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.model.weight_files import (
    BroadcastWeights,
    RandomWeights,
    SafetensorsWeights,
    StackedWeights,
    WeightSource,
    derive_weight_seed,
    draw_adapter,
)
from trivet.trainer.ranks.world import World

logger = logging.getLogger(__name__)

_COMPUTED = (r"rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)$", r"(^|\.)position_ids$")
"""Patterns of tensors that old versions of transformers saved, although they follow from config.json."""
_COMPARED_ROWS = 8192
"""Rows of a tied head that are compared at once. All at once would take twice the embedding's memory on every rank."""
_FRACTION_BITS = 16
"""Bits of float32's fraction that bfloat16 does not have."""
_MAX_NOISE = 2 ** (_FRACTION_BITS - 1) - 1
"""The largest noise, in float32 spacings: one less than half a bfloat16 spacing, which may round to the neighbour."""
_BLOCK_VALUES = 2**15
"""Values whose noise is drawn from one seed, rounded down to whole rows. A rank draws little more than its shard's noise.
torch adds more values than this in several threads, and starting these costs more than the addition."""


def read_config(config: TrainerModelConfig) -> PreTrainedConfig:
    """Read the model's own configuration. `config` can change its rotary positions and its number of layers."""
    try:
        hf_config = AutoConfig.from_pretrained(config.name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as exc:
        raise _not_loadable(config, exc) from exc
    if getattr(hf_config, "quantization_config", None):
        raise ConfigError(
            f"model.name = {config.name!r} has quantized weights, which cannot be trained; give the model before that"
        )
    text_config = hf_config.get_text_config()
    if config.rope_scaling is not None:
        model_rope = getattr(text_config, "rope_parameters", None)
        text_config.rope_parameters = config.rope_scaling.over(model_rope, model=config.name)
    num_layers = config.debug.num_layers
    if num_layers is not None:
        if num_layers > text_config.num_hidden_layers:
            raise ConfigError(
                f"model.debug.num_layers ({num_layers}) must be <= {text_config.num_hidden_layers}, the layers of {config.name}"
            )
        text_config.num_hidden_layers = num_layers
        if getattr(text_config, "layer_types", None):
            text_config.layer_types = text_config.layer_types[:num_layers]
    return hf_config


def build(hf_config: PreTrainedConfig, config: TrainerModelConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with parameters on the meta device, buffers with their values, and the attention of transformers."""
    try:
        with no_init_weights(), init_empty_weights(include_buffers=False):
            causal_lm = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as exc:
        raise _not_loadable(config, exc) from exc
    # Tied parameters went to the meta device one by one and became two.
    causal_lm.tie_weights()
    if config.experts_implementation != "auto":
        causal_lm.set_experts_implementation(config.experts_implementation)
    try:
        causal_lm.generation_config = GenerationConfig.from_pretrained(config.name)
    except OSError:
        logger.info("the model has no generation_config.json; servers get one from its config.json")
    return causal_lm


def fill(model: torch.nn.Module, causal_lm: PreTrainedModel, config: TrainerModelConfig, world: World) -> None:
    """Give the sharded `model`, which holds `causal_lm`, memory and weights. Collective."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=torch.device("cpu") if config.fsdp_cpu_offload else world.device)
    if not isinstance(model, FSDPModule):
        # Tied parameters left the meta device one by one and became two.
        causal_lm.tie_weights()
    for name, buffer in buffers.items():
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._buffers[last] = buffer.to(world.device)
    parameter_names = {original for name, _ in causal_lm.named_parameters() if (original := original_name(name)) is not None}
    source = _open_source(config, causal_lm, parameter_names, world)
    may_dither = config.dither and config.compute_dtype == "bfloat16"
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            is_dithered = may_dither and parameter.requires_grad and parameter.dtype == torch.float32
            _fill(parameter, original_name(name), name, source, is_dithered=is_dithered)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not bool(local.isfinite().all()):
                raise ConfigError(
                    f"model.name = {config.name!r}: {original_name(name)} in its files holds NaN or infinity; no run can start "
                    "from these files, give those of an earlier step"
                )
        _fill_buffers(causal_lm, source)


def original_name(name: str) -> str | None:
    """Return the name of a parameter in the model's own files; None for the factors of an adapter."""
    if ".lora_A." in name or ".lora_B." in name:
        return None
    parts = name.split(".")
    kept: list[str] = []
    for index, part in enumerate(parts):
        if part in ("base_layer", "original_module", "modules_to_save") or parts[index - 1] == "modules_to_save":
            continue
        kept.append(part)
    return ".".join(kept)


def _open_source(
    config: TrainerModelConfig, causal_lm: PreTrainedModel, parameter_names: set[str], world: World
) -> WeightSource:
    """Open the origin of the weights: random numbers, the model's safetensors, or a model that transformers loads on rank 0.

    It refuses files with other tensors than the model has. Collective.
    """

    def require_tied(untied: Collection[str]) -> None:
        if untied:
            raise ConfigError(
                f"model.name = {config.name!r}: config.json ties {min(untied)} to the embedding (tie_word_embeddings), and the "
                "files hold other values for it, so programs load different models; set tie_word_embeddings = false in "
                "config.json, or remove the tensor from the files"
            )

    def differ(files: SafetensorsWeights, name: str, other: str) -> bool:
        shape = causal_lm.get_parameter(other).shape
        return any(
            not torch.equal(
                *(files.read(tensor, shape=shape, first_row=row, num_rows=_COMPARED_ROWS) for tensor in (name, other))
            )
            for row in range(0, shape[0], _COMPARED_ROWS)
        )

    if config.debug.random_init:
        with torch.device("meta"), no_init_weights():
            return RandomWeights(type(causal_lm)._from_config(causal_lm.config))
    try:
        files = SafetensorsWeights.find(config.name)
        if files is not None and not parameter_names <= set(files.names):
            files = StackedWeights.convert(files, causal_lm)
            saved_buffers = causal_lm.state_dict().keys() & {name for name, _ in causal_lm.named_buffers()}
            if files is not None and not {original_name(name) for name in saved_buffers} <= set(files.names):
                files = None  # rank 0 reports what is missing
        if files is not None and parameter_names <= set(files.names):
            # The state has tied names too, and buffers that are saved; other buffers are computed from config.json.
            expected = {original_name(name) for name in causal_lm.state_dict()}
            _require_no_surplus(set(files.names) - expected, causal_lm, config)
            tied = causal_lm.get_expanded_tied_weights_keys(all_submodels=True).items()
            names = set(files.names)
            require_tied([name for name, other in tied if {name, other} <= names and differ(files, name, other)])
            return files
        logger.warning(
            "names in the files of %s are not those of its parameters: rank 0 loads all of it into main memory", config.name
        )
        loaded = BroadcastWeights(config, world)
        _require_no_surplus(loaded.surplus, causal_lm, config)
        require_tied(loaded.untied)
        return loaded
    except (OSError, ValueError, RuntimeError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise _not_loadable(config, exc) from exc


def _require_no_surplus(names: Collection[str], causal_lm: PreTrainedModel, config: TrainerModelConfig) -> None:
    """Refuse tensors of the files that the model has no parameter for, because a server may load what the trainer would drop.

    Tensors that the architecture leaves out by design are only logged.
    """
    if config.debug.num_layers is not None:
        return  # layers that are left out on purpose
    text_config = causal_lm.config.get_text_config()
    first, num_extra = text_config.num_hidden_layers, getattr(text_config, "num_nextn_predict_layers", None) or 0
    patterns = [
        *(causal_lm._keys_to_ignore_on_load_unexpected or ()),
        *_COMPUTED,
        *(rf"\.layers\.{first + index}\." for index in range(num_extra)),
    ]
    left_out = sorted(name for name in names if any(re.search(pattern, name) for pattern in patterns))
    if left_out:
        logger.info(
            "tensors in the files that %s leaves out (such as layers that predict several tokens, or what is computed): they are "
            "neither trained nor published count=%s first=%s",
            type(causal_lm).__name__,
            len(left_out),
            left_out[0],
        )
    if surplus := sorted(set(names).difference(left_out)):
        raise ConfigError(
            f"model.name = {config.name!r}: its files hold {len(surplus)} tensors that {type(causal_lm).__name__} has no place for "
            f"by config.json, e.g. {', '.join(surplus[:2])}: a server may load what the trainer would drop; correct config.json "
            "(number of layers, biases, architecture), or remove them from the files"
        )


def _fill(parameter: torch.Tensor, original: str | None, name: str, source: WeightSource, *, is_dithered: bool) -> None:
    """Fill this rank's shard of a parameter from `source`; without an `original` name it is an adapter's factor, and is drawn."""
    shape = parameter.shape
    local, first_row = parameter, 0
    if isinstance(parameter, DTensor):
        _, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        local, first_row = parameter.to_local(), offsets[0] if offsets else 0
    num_rows = local.shape[0] if shape else 1
    first_row = min(first_row, shape[0] if shape else 0)
    if original is None:
        rows = draw_adapter(name, shape=shape, first_row=first_row, num_rows=num_rows)
    else:
        rows = source.read(original, shape=shape, first_row=first_row, num_rows=num_rows)
        if is_dithered:
            rows = dither(rows, name=original, first_row=first_row)
    local.copy_(rows)


def dither(rows: torch.Tensor, *, name: str, first_row: int) -> torch.Tensor:
    """Return rows of a weight with noise, where bfloat16 can hold the weight exactly; rounding to bfloat16 gives `rows` again.

    Forward, backward and the server use weights rounded to bfloat16, whose spacing is 1/128 to 1/256 of a weight. A weight from a
    bfloat16 file lies exactly in the middle of the interval that rounds to it. Updates of 1e-5 to a weight of 0.1 change nothing
    before they have added up to 2.4e-4. So for tens of steps the trainer learns, and no process computes with what it learnt. Noise
    that is uniform within that interval leaves the start model bit for bit as it was. An update of a hundredth of the spacing then
    moves one rounded weight of a hundred by a whole spacing: on average over the weights, the update.

    The idea is that of dither before a quantizer: L. Schuchman, "Dither signals and their effect on quantization noise", 1964.
    Here the noise is drawn once, for the start, instead of at every rounding as in stochastic rounding, so a step costs no more.

    Args:
        rows: [N, ...], or a scalar, on the CPU, any floating-point dtype.
        name: the tensor's name. Name, row and the run's seed fix the noise, on any number of ranks.
        first_row: the row of the tensor at which `rows` begins.

    Returns:
        float32. Zeros and values between those of bfloat16 are as they were.
    """
    dithered = rows.to(torch.float32, copy=True)
    values = dithered.view(1) if dithered.ndim == 0 else dithered
    if not values.numel():
        return dithered
    block_rows = max(1, _BLOCK_VALUES // values[0].numel())
    end_row = first_row + len(values)
    for block in range(first_row // block_rows, -(-end_row // block_rows)):
        block_start = block * block_rows
        start, end = max(first_row, block_start), min(end_row, block_start + block_rows)
        generator = torch.Generator().manual_seed(derive_weight_seed(f"{name}:{block}"))
        shape = (block_rows, *values.shape[1:])
        noise = torch.randint(-_MAX_NOISE, _MAX_NOISE + 1, shape, generator=generator, dtype=torch.int32)
        part = values[start - first_row : end - first_row]
        is_on_grid = (part.bfloat16().float() == part) & (part != 0) & part.isfinite()
        # Neighbouring floats of one sign have neighbouring bits, across powers of two as well.
        part.view(torch.int32).add_(noise[start - block_start : end - block_start].mul_(is_on_grid))
    return dithered


def _fill_buffers(causal_lm: PreTrainedModel, source: WeightSource) -> None:
    """Fill the buffers that the files contain, such as the balance of a mixture's experts. Collective.

    The other buffers are computed when the model is built.
    """
    if isinstance(source, RandomWeights):
        return
    saved = causal_lm.state_dict().keys()
    names = source.names if isinstance(source, SafetensorsWeights) else saved
    for name, buffer in causal_lm.named_buffers():
        original = original_name(name)
        if name in saved and original is not None and (original in names or name in names):
            buffer.copy_(
                source.read(original, shape=buffer.shape, first_row=0, num_rows=buffer.shape[0] if buffer.shape else 1)
            )


def _not_loadable(config: TrainerModelConfig, exc: Exception) -> ConfigError:
    where = "" if Path(config.name).is_dir() else " (not a directory here, so looked for as a Hugging Face name)"
    return ConfigError(f"model.name = {config.name!r} cannot be loaded as a causal language model{where}: {exc}")
