import json
from pathlib import Path

import pytest
import torch

from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.model import LoRAConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import BenchConfig, TrainerConfig, TrainerModelConfig
from trivet.errors import ConfigError
from trivet.trainer.losses.formulas import cross_entropy, make_policy_loss
from trivet.trainer.measurement.bench import Spread, require_folder, run_bench
from trivet.trainer.measurement.performance import ModelCost
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.open_session import make_learner

COST = ModelCost(matmul_parameters=1000, num_layers=1, attention_width=8, hidden_size=4)


@pytest.fixture
def shape(tiny_model, tmp_path):
    """Write a model directory without tokenizer or chat template."""
    directory = tmp_path / "shape"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).symlink_to(tiny_model / name)
    return directory


def read(path):
    return json.loads(path.read_text())


def test_the_file_has_the_fields_of_the_published_figures(shape, world, tmp_path, capsys):
    config = TrainerConfig(
        output_dir=tmp_path / "outputs",
        model=TrainerModelConfig(name=str(shape), seq_len=32, compute_dtype="float32"),
        bench=BenchConfig(output_json=tmp_path / "results" / "bench.json", num_steps=3),
    )
    run_bench(config, world, loss=make_policy_loss(config.loss), kind="rl")
    found = read(tmp_path / "results" / "bench.json")
    assert found["kind"] == "rl"
    assert found["tokens_per_step"] == 2 * 32
    assert len(found["step_times"]) == 3
    assert found["step_time"]["min"] == min(found["step_times"][1:])
    assert found["throughput"]["max"] == pytest.approx(64 / found["step_time"]["min"])
    assert set(found["mfu"]) == {"mean", "std", "min", "max"}
    assert 0 < found["mfu"]["mean"] < 100
    assert found["peak_flops_source"] == "measured"
    assert found["peak_memory"]["gib"] > 0
    assert found["num_trained_parameters"] == found["num_parameters"]
    assert found["config"]["model"]["seq_len"] == 32
    assert "throughput, tokens/s" in capsys.readouterr().out
    assert not (tmp_path / "outputs").exists()


def test_an_adapter_a_reference_and_supervised_fine_tuning_are_measured_too(shape, world, tmp_path):
    model = TrainerModelConfig(name=str(shape), seq_len=16, compute_dtype="float32", lora=LoRAConfig(rank=2))
    bench = BenchConfig(num_steps=2, rows_per_rank=1)
    rl = TrainerConfig(output_dir=tmp_path / "outputs", model=model, loss=DefaultLossConfig(beta=0.1), bench=bench)
    report = run_bench(rl, world, loss=make_policy_loss(rl.loss), kind="rl")
    assert 0 < report.num_trained_parameters < report.num_parameters
    sft = SftConfig(output_dir=tmp_path / "outputs", model=model.model_copy(update={"lora": None}), bench=bench)
    report = run_bench(sft, world, loss=cross_entropy, kind="sft")
    assert report.num_trained_parameters == report.num_parameters
    assert not (tmp_path / "outputs").exists()


def test_the_first_step_does_not_count_and_rates_are_amounts_over_time(shape, world, tmp_path, monkeypatch):
    seconds = [60.0, 1.0, 3.0]

    def time_work(work, device):
        work()
        return seconds.pop(0)

    monkeypatch.setattr("trivet.trainer.measurement.bench.measured_flops", lambda device, dtype: 1e9)
    monkeypatch.setattr("trivet.trainer.measurement.bench.measure_seconds", time_work)
    monkeypatch.setattr("trivet.trainer.measurement.bench.model_cost", lambda model: COST)
    model = TrainerModelConfig(name=str(shape), seq_len=32, compute_dtype="float32")
    config = TrainerConfig(output_dir=tmp_path, model=model, bench=BenchConfig(num_steps=3))
    before = load_policy(config.model, world)
    learners = []
    monkeypatch.setattr(
        "trivet.trainer.measurement.bench.make_learner", lambda *a, **k: learners.append(make_learner(*a, **k)) or learners[0]
    )
    report = run_bench(config, world, loss=cross_entropy, kind="rl")
    assert report.step_time == Spread(mean=2.0, std=1.0, min=1.0, max=3.0)
    assert report.throughput.max == 2 * 32
    assert report.throughput.mean == 2 * 2 * 32 / 4, "tokens over time, not a mean of rates"
    assert report.mfu.mean == pytest.approx(report.mfu.max / 2)
    assert report.mfu.max == pytest.approx(100 * 64 * (6 * 1000 + 12 * 4 * 32) / 1e9)
    pairs = zip(before.parameters(), learners[0].model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs), "a benchmark takes the steps that training takes"


@pytest.mark.parametrize(("shares", "computed"), [(True, 2 * (20 + 4 * 4)), (False, 2 * 4 * 24)])
def test_tokens_that_a_group_shares_are_learnt_from_in_each_sample_and_computed_once(
    shape, world, tmp_path, capsys, shares, computed
):
    config = TrainerConfig(
        output_dir=tmp_path / "outputs",
        model=TrainerModelConfig(name=str(shape), seq_len=96, compute_dtype="float32", share_prefixes=shares),
        bench=BenchConfig(num_steps=2, prompt_len=20, answer_len=4, group_size=4),
    )
    report = run_bench(config, world, loss=make_policy_loss(config.loss), kind="rl")
    assert report.tokens_per_step == 2 * 4 * 24
    assert report.computed_tokens_per_step == computed
    assert report.computed_throughput.max == pytest.approx(computed / report.step_time.min)
    assert "computed tokens/s" in capsys.readouterr().out


def test_a_report_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"bench\.output_json .* cannot be written: File exists"):
        require_folder(tmp_path / "file" / "bench.json")
    with pytest.raises(ConfigError, match="is a directory"):
        require_folder(tmp_path)
    require_folder(tmp_path / "new" / "bench.json")
    assert (tmp_path / "new").is_dir()
