"""Translates `inference.model.rope_scaling` into vLLM's form: complete, because vLLM replaces the model's own positions."""

from trivet.config.sections.inference import InferenceConfig
from trivet.errors import ConfigError


def position_overrides(config: InferenceConfig) -> dict[str, object]:
    """Return vLLM's `hf_overrides` with the positions over what `vllm_args` overrides; empty without rope_scaling.

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
    others = config.vllm_args.get("hf_overrides") or {}
    return {"hf_overrides": {**others, "rope_parameters": model.rope_scaling.over(own, model=model.name)}}
