"""scripts/bench/gpu_rows.py gives the trainer a valid configuration for every case, on machines with and without a GPU."""

from pathlib import Path

import pytest

from support.scripts import load_script
from trivet.config.load import load_config
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig

script = load_script("bench/gpu_rows")
shapes = load_script("make_shape").SHAPES


@pytest.mark.parametrize("case", script.CASES, ids=lambda case: case.name)
def test_every_case_is_a_valid_configuration(case):
    kind = {"trainer": TrainerConfig, "sft": SftConfig}[case.command]
    flags = script.case_flags(case, directory=Path("shape"), output_json=Path("b.json"), is_cuda=True)
    config = load_config(kind, flags, environ={}).config
    assert case.shape in shapes
    assert (config.model.seq_len, config.bench.num_steps, config.bench.rows_per_rank) == (case.seq_len, 4, 2)
    assert (config.model.lora.rank if config.model.lora else None) == case.lora_rank
    assert config.model.debug.random_init
    assert config.model.ac is not None
    assert config.model.compile is not None
    assert (config.model.optimization_dtype, config.model.reduce_dtype) == ("float32", "float32")


def test_what_is_added_wins():
    flags = script.case_flags(
        script.CASES[0], directory=Path("s"), output_json=Path("b"), is_cuda=True, extra=["--model.compile", "None"]
    )
    assert load_config(TrainerConfig, flags, environ={}).config.model.compile is None


def test_a_case_is_compared_with_what_was_published():
    spread = {"mean": 0.995, "std": 0.0}
    report = dict.fromkeys(("step_time", "throughput", "mfu", "model_mfu"), spread)
    report |= {"peak_memory": {"gib": 9.0}, "device": "H100", "versions": {}}
    found = script.summarize(script.CASES[0], report, is_published_shape=True)
    assert found["speedup"] == pytest.approx(2.0)
    assert "speedup" not in script.summarize(script.CASES[0], report, is_published_shape=False)
