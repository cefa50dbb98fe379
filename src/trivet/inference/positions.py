"""Translates `inference.model.rope_scaling` into vLLM's form: complete, because vLLM replaces the model's own positions."""

from collections.abc import Mapping

from trivet.config.schema.inference import InferenceConfig
from trivet.errors import ConfigError


def position_overrides(config: InferenceConfig, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return vLLM's `hf_overrides`: `overrides` and the positions. Empty without rope_scaling.

    Args:
        overrides: the other overrides of the model's own configuration.

    Raises:
        ConfigError: the model cannot be read, or its layers share no rotary positions.
    """
    model = config.model
    if model.rope_scaling is None:
        return {}
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(model.name, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.name = {model.name!r} cannot be loaded: {exc}") from exc
    own = getattr(hf_config, "rope_parameters", None)
    return {"hf_overrides": {**overrides, "rope_parameters": model.rope_scaling.over(own, model=model.name)}}
