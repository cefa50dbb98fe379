"""Decides which models packed rows can be trained on, and how a model's head product becomes logits.

Called by `trainer.model.policy_model` before weights are read. A model that is not known to come out right is refused, because it
would silently train wrong.
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trivet.errors import ConfigError

_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Kinds of layers that carry nothing from one token to the next except through attention."""
_PROBE = (-40.0, -3.0, -0.5, 0.0, 0.25, 2.0, 40.0)
"""Products of the head on which a model's own logits are compared: small and large enough to show a scale and a softcap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """Makes logits from the head's product: logits = scale * product, where the product is bent to +-softcap by tanh."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Return the logits of `products`, in their shape."""
        capped = products if self.softcap is None else torch.tanh(products / self.softcap) * self.softcap
        return capped * self.scale


def require_text_decoder(config: PreTrainedConfig, *, name: str, seq_len: int) -> None:
    """Refuse a model that is not a causal decoder of text with attention layers only.

    Raises:
        ConfigError: a model of more than text, an encoder with a decoder, or one whose layers carry a state along the row.
    """
    refusal = f"model.name = {name!r} ({config.model_type}) cannot be trained: "
    if parts := sorted(set(cast("dict[str, object]", type(config).sub_configs)) - {"text_config"}):
        raise ConfigError(f"{refusal}it has parts other than a language model ({', '.join(parts)}); give a text-only model")
    if config.is_encoder_decoder:
        raise ConfigError(f"{refusal}it is an encoder with a decoder; give a causal language model")
    if getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(f"{refusal}its attention sees later tokens; give a causal language model")
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    if others := sorted(set(kinds) - _LAYERS):
        raise ConfigError(
            f"{refusal}its layers {', '.join(others)} carry a state along the row, which would leak from one packed sample into "
            "the next; give a model with attention layers alone"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if "chunked_attention" in kinds and chunk is not None and chunk < seq_len:
        raise ConfigError(
            f"{refusal}it attends within chunks of {chunk} tokens, model.seq_len is {seq_len}, and packed rows have no chunks; "
            f"set model.seq_len <= {chunk}"
        )


def require_packable(causal_lm: PreTrainedModel, *, name: str) -> None:
    """Refuse a model whose attention cannot be replaced by packed attention.

    Raises:
        ConfigError: the model's own code would let samples of a row see each other, or does what packed attention does not.
    """
    refusal = f"model.name = {name!r} ({type(causal_lm).__name__}) cannot be trained: "
    if causal_lm._is_stateful:
        raise ConfigError(
            f"{refusal}it carries a state along the row, which would leak from one packed sample into the next; give a model "
            "with attention layers alone"
        )
    if not causal_lm._supports_attention_backend:
        raise ConfigError(
            f"{refusal}it has an attention of its own, which does not know where the samples of a packed row end; give a model "
            "whose attention transformers can exchange, such as Llama, Qwen or Gemma"
        )
    if any(parameter.endswith(".sinks") for parameter, _ in causal_lm.named_parameters()):
        raise ConfigError(f"{refusal}its attention has sinks, which packed attention has not; give a model without")


def find_logit_rule(causal_lm: PreTrainedModel, *, name: str) -> LogitRule:
    """Read from its configuration how `causal_lm` makes logits, and confirm it by its own code on a few numbers.

    Raises:
        ConfigError: the head is no plain linear one, or its product is changed in a way that is not known here.
    """
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ConfigError(f"model.name = {name!r} has no plain linear head without bias, which the trainer needs")
    rule = _rule_of(causal_lm.config)
    products = torch.tensor(_PROBE).repeat(2, 1)[None]
    try:
        logits = _run_around_head(causal_lm, head, products)
    except Exception as exc:  # a model's own code may raise anything
        raise ConfigError(
            f"model.name = {name!r}: {type(causal_lm).__name__} does not get its logits from the head alone ({exc}); the trainer "
            "computes them by itself and cannot train it"
        ) from exc
    if logits.shape != products.shape or not torch.allclose(logits.float(), rule(products), rtol=1e-3):
        raise ConfigError(
            f"model.name = {name!r}: {type(causal_lm).__name__} changes its logits in a way that the trainer does not know, beyond "
            "final_logit_softcapping, logit_scale and logits_scaling; give another model"
        )
    return rule


def _rule_of(config: PreTrainedConfig) -> LogitRule:
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return LogitRule(scale=scale / divisor, softcap=getattr(config, "final_logit_softcapping", None))


class _Outputs:
    """The outputs of a base model: a hidden state, and None for everything else that may be asked for."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> torch.Tensor:
        return (self.last_hidden_state,)[index]  # type: ignore[reportReturnType]  # a slice of the tuple goes unused


class _Returns(torch.nn.Module):
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return _Outputs(self._hidden)


def _run_around_head(causal_lm: PreTrainedModel, head: torch.nn.Linear, products: torch.Tensor) -> torch.Tensor:
    """Return the logits that the model's forward makes of `products`, with the head and what comes before it left out."""
    shell = copy.copy(causal_lm)
    modules = dict(causal_lm._modules)
    modules[causal_lm.base_model_prefix] = _Returns(products)
    (head_name,) = (key for key, module in modules.items() if module is head)
    modules[head_name] = torch.nn.Identity()
    shell._modules = modules
    with torch.no_grad():
        return shell.forward(input_ids=torch.zeros(products.shape[:2], dtype=torch.int64), use_cache=False).logits
