"""The shapes of known models are right, as their number of parameters shows."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.scripts import load_script

script = load_script("make_shape")


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-1.7B", 1_720_574_976),
        ("Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Qwen3-8B", 8_190_735_360),
        ("SmolLM2-135M", 134_515_008),
    ],
)
def test_a_shape_has_the_parameters_of_its_model(name, num_parameters, tmp_path):
    script.make_config(name).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_every_shape_is_counted_here():
    known = {"Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B-Instruct-2507", "Qwen3-8B", "SmolLM2-135M"}
    assert set(script.SHAPES) == known | {"Qwen3-tiny"}
