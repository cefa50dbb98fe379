"""Decides which models can be trained, which of them on rows of several samples, and by which rule a head's product becomes logits;
finds the rates of dropout and noise; refuses names, dtypes and divisions of rows that do not fit.

Called by `trainer.model.policy_model` before weights are read. A model that may train wrong without an error is refused.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trivet.config.schema.model import LoRAConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.weights.adapters import is_adapter

logger = logging.getLogger(__name__)

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
"""Kinds of layers in which a token depends on others only through attention over a row or a window."""
_ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the length of the sequence."""
_TEST_PRODUCTS = (-40.0, -3.0, -0.5, 0.0, 0.25, 2.0, 40.0)
"""Outputs of a head from which a model's own logits are computed: small and large enough to show a scale and a softcap."""
_OTHER_HEADS = ("classifier", "summary", "qa", "seq_classif")
"""Starts of the names of rates that belong to other heads than that of a language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """Makes logits from the head's product: logits = scale * softcap * tanh(product / softcap); without softcap scale * product."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Return the logits of `products`, in their shape."""
        capped = products if self.softcap is None else torch.tanh(products / self.softcap) * self.softcap
        return capped * self.scale


def require_text_decoder(config: PreTrainedConfig, *, name: str) -> None:
    """Refuse a model that is not a causal decoder of text."""
    refusal = f"model.name = {name!r} ({config.model_type}) cannot be trained: "
    if parts := sorted(set(cast("dict[str, object]", type(config).sub_configs)) - {"text_config"}):
        raise ConfigError(f"{refusal}it has parts other than a language model ({', '.join(parts)}); give a text-only model")
    if config.is_encoder_decoder:
        raise ConfigError(f"{refusal}it is an encoder with a decoder; give a causal language model")
    if getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(f"{refusal}its attention sees later tokens; give a causal language model")


def why_unpacked(causal_lm: PreTrainedModel, *, seq_len: int) -> str | None:
    """Return why a row can hold one sample only, as a clause for the user; None for a model whose rows can hold several.

    A sample alone in its row is computed by transformers, so it is right for every model.
    """
    config = causal_lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if causal_lm._is_stateful or not kinds <= _ATTENTION_LAYERS | {"chunked_attention"}:
        return "its layers carry a state along the row"
    if not causal_lm._supports_attention_backend:
        return "it has an attention of its own, which transformers cannot exchange"
    if "chunked_attention" in kinds and config.attention_chunk_size < seq_len:
        return f"it attends within chunks of {config.attention_chunk_size} tokens"
    rope = getattr(config, "rope_parameters", None) or {}
    for scaling in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        # Transformers chooses the frequencies of these by the longest sample of the row.
        original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        if scaling.get("rope_type") in _ROPES_BY_LENGTH and original < seq_len:
            return f"its rotary positions depend on the length of the sample beyond {original} tokens"
    return None


def find_logit_rule(causal_lm: PreTrainedModel, *, name: str) -> LogitRule:
    """Find the rule by which `causal_lm` makes logits of its head's output: run its own code on `_TEST_PRODUCTS`."""
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(f"model.name = {name!r} has no plain linear head, which the trainer needs")
    products = torch.tensor(_TEST_PRODUCTS, dtype=torch.float64).repeat(2, 1)[None]
    try:
        logits = _run_around_head(causal_lm, head, products)
    except Exception as exc:  # a model's own code may raise anything
        raise ConfigError(
            f"model.name = {name!r}: {type(causal_lm).__name__} does not get its logits from the head alone ({exc}); the trainer "
            "computes them by itself and cannot train it"
        ) from exc
    unscaled = LogitRule(softcap=getattr(causal_lm.config, "final_logit_softcapping", None))
    capped, logits = unscaled(products), logits.double()
    rule = replace(
        unscaled, scale=float((logits * capped).sum() / capped.square().sum()) if logits.shape == capped.shape else 0.0
    )
    if not rule.scale > 0 or not torch.allclose(logits, capped * rule.scale, rtol=1e-3):
        raise ConfigError(
            f"model.name = {name!r}: {type(causal_lm).__name__} changes its logits in a way that the trainer does not know, beyond "
            "a scale and final_logit_softcapping; give another model"
        )
    return rule


class _Outputs:
    """The outputs of a base model, as a causal model reads them: a hidden state, and None for every other attribute."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> torch.Tensor:
        return (self.last_hidden_state,)[index]  # type: ignore[reportReturnType]  # a slice of the tuple goes unused


class _StandIn(torch.nn.Module):
    """Replaces `module` by `function`. Other attributes are read from `module`."""

    def __init__(self, module: torch.nn.Module, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.__dict__["_module"] = module  # past torch, which would make it a submodule
        self._function = function

    def forward(self, inputs: Any = None, **_: Any) -> Any:
        return self._function(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _run_around_head(causal_lm: PreTrainedModel, head: torch.nn.Linear, products: torch.Tensor) -> torch.Tensor:
    """Return the logits that the model's forward computes if its head gives `products`; decoder and head do not run."""
    shell = copy.copy(causal_lm)
    decoder = find_decoder(causal_lm)
    stand_ins = {decoder: _StandIn(decoder, lambda _: _Outputs(products)), head: _StandIn(head, lambda hidden: hidden)}
    shell._modules = {name: stand_ins.get(module, module) for name, module in causal_lm._modules.items()}
    with torch.no_grad():
        return shell.forward(input_ids=torch.zeros(products.shape[:2], dtype=torch.int64), use_cache=False).logits


def find_decoder(causal_lm: PreTrainedModel) -> torch.nn.Module:
    """Return the module before the head. Llama 4 has it under another name than its class declares."""
    base = causal_lm.base_model
    return causal_lm.get_submodule("model") if base is causal_lm else base


def find_random_rates(hf_config: PreTrainedConfig) -> dict[str, float]:
    """Return the rates above 0 of dropout, layer drop and router noise in a model's own configuration, by their keys."""
    return {
        key: float(value)
        for key, value in hf_config.get_text_config().to_dict().items()
        if ("drop" in key or "jitter" in key) and not key.startswith(_OTHER_HEADS)
        if isinstance(value, float | int) and not isinstance(value, bool) and value > 0
    }


def report_random_rates(rates: Mapping[str, float], lora: LoRAConfig | None, *, keeps_dropout: bool) -> None:
    """Log which of `rates`, and whether the dropout of the adapter, is drawn (`load_policy` explains `keeps_dropout`)."""
    if rates:
        drawn = "drawn in training steps" if keeps_dropout else "not drawn, as servers do not draw them"
        logger.info(
            "random rates of the model's config.json are %s: %s",
            drawn,
            " ".join(f"{key}={rate:g}" for key, rate in rates.items()),
        )
    if lora is not None and lora.dropout and not keeps_dropout:
        logger.warning(
            "model.lora.dropout = %g is drawn in training steps, and servers do not draw it: mismatch_kl is above 0 even for the "
            "policy that was sampled from; 0 turns it off",
            lora.dropout,
        )


def require_divisible_heads(causal_lm: PreTrainedModel, config: TrainerModelConfig) -> None:
    """Refuse to divide attention over more ranks than divide its heads."""
    num_heads = causal_lm.config.get_text_config().num_attention_heads
    if num_heads % config.cp:
        raise ConfigError(
            f"model.cp ({config.cp}) must divide the attention heads of model.name ({num_heads}): {num_heads} % {config.cp} = "
            f"{num_heads % config.cp}; set it to a divisor of {num_heads}"
        )


def require_whole_rows(config: TrainerModelConfig, reason: str) -> None:
    """Refuse to divide the rows of a model over ranks whose attention this project does not compute, for `reason`."""
    if config.cp > 1:
        raise ConfigError(
            f"model.cp = {config.cp} cannot divide the rows of model.name = {config.name!r}: {reason}; set model.cp = 1"
        )


def require_dtypes(config: TrainerModelConfig, device: torch.device) -> None:
    """Refuse dtypes in which the device, or the configured attention, cannot compute."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        for key in ("compute_dtype", "optimization_dtype", "reduce_dtype"):
            if getattr(config, key) == "bfloat16":
                raise ConfigError(
                    f'model.{key} = "bfloat16", which {torch.cuda.get_device_name(device)} cannot compute in; it can float32: set '
                    f'model.{key} = "float32"'
                )
    if config.attn.startswith("flash") and config.compute_dtype == "float32":
        raise ConfigError(
            f'model.attn = "{config.attn}" computes in bfloat16 only, and model.compute_dtype is "float32"; set model.attn = '
            '"sdpa", or model.compute_dtype = "bfloat16"'
        )


def require_model(name: str) -> None:
    """Refuse a name that cannot be a model, before anything is downloaded."""
    path = Path(name)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_adapter(path):
        raise ConfigError(
            f"model.name = {name!r} is an adapter; put it into its base model first: uv run trivet merge {name} OUTPUT_DIR"
        )
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(f"model.name = {name!r} has no config.json: it is not a Hugging Face model directory")
    if looks_like_path and not path.is_dir():
        raise ConfigError(f"model.name = {name!r} is not a directory; give a model directory or a Hugging Face name")
