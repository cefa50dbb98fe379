"""What scripts/bench/gpu_rows.py asks of the trainer is a configuration, for every row and on both kinds of machine."""

from pathlib import Path

import pytest

from support.scripts import load_script
from trivet.config.loading.load import load_config
from trivet.config.sections.sft import SftConfig
from trivet.config.sections.trainer import TrainerConfig

script = load_script("bench/gpu_rows")
shapes = load_script("make_shape").SHAPES


@pytest.mark.parametrize("row", script.ROWS, ids=lambda row: row.name)
def test_every_row_is_a_valid_configuration(row):
    kind = {"trainer": TrainerConfig, "sft": SftConfig}[row.command]
    flags = script.row_flags(row, directory=Path("shape"), output_json=Path("b.json"), is_cuda=True)
    config = load_config(kind, flags, environ={}).config
    assert row.shape in shapes
    assert (config.model.seq_len, config.bench.num_steps, config.bench.rows_per_rank) == (row.seq_len, 4, 2)
    assert (config.model.lora.rank if config.model.lora else None) == row.lora_rank
    assert config.model.debug.random_init
    assert config.model.ac is not None
    assert config.model.compile is not None
    assert (config.model.optimization_dtype, config.model.reduce_dtype) == ("float32", "float32")


def test_what_is_added_wins():
    flags = script.row_flags(
        script.ROWS[0], directory=Path("s"), output_json=Path("b"), is_cuda=True, extra=["--model.compile", "None"]
    )
    assert load_config(TrainerConfig, flags, environ={}).config.model.compile is None


def test_a_row_is_compared_with_what_was_published():
    spread = {"mean": 0.995, "std": 0.0}
    report = dict.fromkeys(("step_time", "throughput", "mfu", "model_mfu"), spread)
    report |= {"peak_memory": {"gib": 9.0}, "device": "H100", "versions": {}}
    found = script.summarize(script.ROWS[0], report, is_published_shape=True)
    assert found["speedup"] == pytest.approx(2.0)
    assert "speedup" not in script.summarize(script.ROWS[0], report, is_published_shape=False)
