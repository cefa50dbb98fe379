"""Finds what of a model draws random numbers in training, and says what of it is drawn. Called by `trainer.model.policy_model`."""

import logging
from collections.abc import Mapping

from transformers import PreTrainedConfig

from trivet.config.schema.model import LoRAConfig

logger = logging.getLogger(__name__)

_OTHER_HEADS = ("classifier", "summary", "qa", "seq_classif")
"""Starts of the names of rates that belong to heads other than that of a language model."""


def find_random_rates(hf_config: PreTrainedConfig) -> dict[str, float]:
    """Return the rates above 0 of dropout, layer drop and router noise in a model's own configuration, by their keys."""
    return {
        key: float(value)
        for key, value in hf_config.get_text_config().to_dict().items()
        if ("drop" in key or "jitter" in key) and not key.startswith(_OTHER_HEADS)
        if isinstance(value, float | int) and not isinstance(value, bool) and value > 0
    }


def report_random_rates(rates: Mapping[str, float], lora: LoRAConfig | None, *, keeps_dropout: bool) -> None:
    """Log which of `rates`, and whether the dropout of the adapter, is drawn.

    Args:
        keeps_dropout: see `trainer.model.policy_model.load_policy`.
    """
    if rates:
        drawn = "drawn in training steps" if keeps_dropout else "not drawn, as servers do not draw them"
        logger.info("random rates of the model's config.json are %s: %s", drawn, _show(rates))
    if lora is not None and lora.dropout and not keeps_dropout:
        logger.warning(
            "model.lora.dropout = %g is drawn in training steps, and servers do not draw it: mismatch_kl is above 0 even for the "
            "policy that was sampled from; 0 turns it off",
            lora.dropout,
        )


def _show(rates: Mapping[str, float]) -> str:
    return " ".join(f"{key}={rate:g}" for key, rate in rates.items())
