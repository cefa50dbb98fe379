"""The forecast of a run, compared with arithmetic by hand and with the tensors that the trainer really makes."""

import json
from pathlib import Path

import pytest

from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.launcher.forecast import (
    FIRST_STEPS,
    Forecast,
    ModelShape,
    compare_with_facts,
    describe_forecast,
    make_forecast,
    read_facts,
    read_shape,
)

GIB = 2**30
SHAPE = ModelShape(
    num_parameters=1000 * 2**20,
    num_trained=1000 * 2**20,
    num_product_parameters=900 * 2**20,
    hidden=1024,
    within_mlp=4096,
    layers=8,
    vocabulary=32768,
)


def load(tmp_path: Path, *flags: str, model: str = "nowhere") -> RLConfig:
    file = tmp_path / "rl.toml"
    file.write_text(
        f'seq_len = 512\nmax_model_len = 512\nmodel.name = "{model}"\ntrainer.model.compute_dtype = "float32"\n'
        'inference.model.dtype = "float32"\n\n[orchestrator]\nbatch_size = 32\nrollouts_per_example = 4\n'
        'env = [{ id = "x" }]\nsampling = { max_tokens = 100 }\n'
    )
    return load_config(RLConfig, ["@", str(file), *flags], environ={}).config


def test_memory_and_seconds_follow_from_the_shape(tmp_path: Path) -> None:
    found = make_forecast(load(tmp_path), SHAPE, num_ranks=2, rate=1e12)
    parts = found.trainer_gib
    assert parts["weights"] == pytest.approx(1000 * 2**20 * 4 / 2 / GIB)
    assert parts["gradients"] == parts["weights"]
    assert parts["optimizer"] == 2 * parts["weights"]
    assert parts["activations"] == pytest.approx(512 * 8 * (16 * 1024 + 4 * 4096) * 4 / GIB)
    assert parts["logits"] == pytest.approx(512 * 32768 * 4 * 2 / GIB)
    assert found.server_gib["weights"] == pytest.approx(1000 * 2**20 * 4 / GIB)
    # 32 rollouts of 128 prompt tokens and 100 sampled ones; a group of four shares its prompt in the trainer.
    assert found.seconds["training"] == pytest.approx(6 * 900 * 2**20 * 32 * (128 / 4 + 100) / 0.5e12)
    assert found.seconds["generation"] == pytest.approx(2 * 900 * 2**20 * 32 * 228 / 0.5e12 + 100 * 0.02)
    slowed = make_forecast(load(tmp_path), SHAPE, num_ranks=2, rate=1e12, slowdown=3.0)
    assert slowed.seconds["generation"] - found.seconds["generation"] == pytest.approx(2 * 100 * 0.02)
    assert any("slow this machine down, 3.0 times" in text for text in slowed.assumptions)


def test_checkpointing_and_other_dtypes_change_their_parts(tmp_path: Path) -> None:
    plain = make_forecast(load(tmp_path), SHAPE, num_ranks=1, rate=None)
    saved = make_forecast(
        load(tmp_path, "--trainer.model.ac.freq", "1", "--trainer.model.compute-dtype", "bfloat16"),
        SHAPE,
        num_ranks=1,
        rate=None,
    )
    assert saved.trainer_gib["weights"] == pytest.approx(1.5 * plain.trainer_gib["weights"])
    assert saved.trainer_gib["activations"] < plain.trainer_gib["activations"] / 16
    assert plain.seconds == {}
    assert any("--bench" in text for text in plain.assumptions)


def test_the_shape_is_that_of_the_model_that_the_trainer_loads(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = load(tmp_path, model=str(tiny_model))
    shape, model = read_shape(config), AutoModelForCausalLM.from_pretrained(tiny_model)
    assert shape is not None
    assert shape.num_parameters == shape.num_product_parameters == sum(p.numel() for p in model.parameters())
    assert (shape.layers, shape.hidden) == (model.config.num_hidden_layers, model.config.hidden_size)
    assert read_shape(load(tmp_path)) is None


def test_an_adapter_trains_as_many_parameters_as_peft_adds(tmp_path: Path, tiny_model: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = load(tmp_path, "--trainer.model.lora.rank", "4", model=str(tiny_model))
    lora = config.trainer.model.lora
    assert lora is not None
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=4, target_modules=lora.target_modules)
    )
    shape = read_shape(config)
    assert shape is not None
    assert shape.num_trained == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    found = make_forecast(load(tmp_path), SHAPE, num_ranks=1, rate=1e12)
    assert any("does not fit" in line for line in describe_forecast(found, available_gib=8.0))
    assert any(" fits into" in line for line in describe_forecast(found, available_gib=80.0))


def test_only_what_was_off_by_more_than_a_quarter_is_named() -> None:
    found = Forecast(trainer_gib={"weights": 4.0}, server_gib={}, seconds={"generation": 2.0, "training": 1.0}, assumptions=[])
    facts = {"trainer memory, GiB": 4.9, "generation, s": 1.0, "training, s": 1.2, "step, s": 2.5}
    text = compare_with_facts(found, facts)
    assert text == "forecast: off by more than a quarter: generation, s: 2.00 forecast, 1.00 measured"
    assert "within a quarter" in compare_with_facts(found, facts | {"generation, s": 1.7})


def test_the_facts_are_the_medians_of_the_first_steps_without_the_first(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.metrics.mkdir()
    seconds = [50.0, 1.0, 2.0, 3.0, 90.0]

    def write(count: int) -> None:
        for role in ("trainer", "orchestrator"):
            lines = [
                {"step": 7 + n, "time": 0.0, "time/step": s, "time/generate_completions": 2 * s, "time/forward_backward": s}
                for n, s in enumerate(seconds[:count], start=1)
            ]
            (layout.metrics / f"{role}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(FIRST_STEPS - 1)
    assert read_facts(layout, from_step=7) is None
    write(FIRST_STEPS)
    facts = read_facts(layout, from_step=7)
    assert facts is not None
    assert (facts["step, s"], facts["generation, s"], facts["training, s"]) == (2.5, 5.0, 2.5)
