"""Rotary positions other than the default reach vLLM with all their parameters."""

import json
from pathlib import Path

import pytest

from trivet.config.schema.inference import InferenceConfig
from trivet.errors import ConfigError
from trivet.inference.positions import position_overrides

SCALING = {"rope_type": "linear", "factor": 2.0}


def make_config(directory: Path, model: dict[str, object], **values: object) -> InferenceConfig:
    (directory / "config.json").write_text(json.dumps(model))
    return InferenceConfig.model_validate({"model": {"name": str(directory), "rope_scaling": SCALING}, **values})


def test_the_models_own_base_is_kept(tmp_path: Path) -> None:
    model: dict[str, object] = {"model_type": "qwen3", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert position_overrides(make_config(tmp_path, model), {"vocab_size": 7}) == {
        "hf_overrides": {"vocab_size": 7, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    }


def test_without_the_key_nothing_is_overridden() -> None:
    assert position_overrides(InferenceConfig(), {"vocab_size": 7}) == {}


def test_a_model_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rotary positions that all its layers share; remove it"):
        position_overrides(make_config(tmp_path, {"model_type": "gpt2"}), {})
