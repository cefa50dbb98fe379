"""A run that is saved and loaded continues exactly. Other numbers of ranks are in tests/integration."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.shards import write_state
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.shared import CkptConfig
from trivet.errors import CheckpointError
from trivet.trainer.checkpoint.state import TrainerProgress, collect_state, load_part, progress_to_resume
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.step import Learner, train_step


def save_part(directory: Path, learner: Learner, progress: TrainerProgress) -> None:
    write_state(directory, collect_state(learner, progress), learner.world)


def train(learner: Learner, oracle, steps: range) -> list[float]:
    batches = {step: [oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=step))] for step in steps}
    return [train_step(learner, batches[step], step=step).loss for step in steps]


def test_three_steps_a_reload_and_three_more_equal_six(any_model: Path, make_learner, oracle, tmp_path: Path) -> None:
    unbroken = make_learner(any_model, loss=DefaultLossConfig(), lr=1e-2, max_norm=1.0)
    expected = train(unbroken, oracle, range(1, 7))
    first = make_learner(any_model, loss=DefaultLossConfig(), lr=1e-2, max_norm=1.0)
    losses = train(first, oracle, range(1, 4))
    save_part(tmp_path, first, TrainerProgress(step=3, total_tokens=123, total_samples=12))
    second = make_learner(any_model, loss=DefaultLossConfig(), lr=1e-2, max_norm=1.0)
    assert load_part(tmp_path, second) == TrainerProgress(step=3, total_tokens=123, total_samples=12)
    losses += train(second, oracle, range(4, 7))
    assert losses == expected
    for ours, theirs in zip(second.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_random_state_is_restored(tiny_model: Path, make_learner, tmp_path: Path) -> None:
    learner = make_learner(tiny_model)
    save_part(tmp_path, learner, TrainerProgress())
    expected = torch.rand(3)
    load_part(tmp_path, learner)
    assert torch.equal(torch.rand(3), expected)


def on_a_gpu(learner: Learner) -> Learner:
    """Return the learner with a world that says so; its tensors stay on the CPU."""
    return replace(learner, world=replace(learner.world, device=torch.device("cuda", 0)))


def test_the_random_state_of_a_gpu_is_restored_where_there_is_one(
    tiny_model: Path, make_learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append(state))
    (on_cpu := tmp_path / "cpu").mkdir()
    (on_cuda := tmp_path / "cuda").mkdir()
    learner = make_learner(tiny_model)
    save_part(on_cpu, learner, TrainerProgress())
    save_part(on_cuda, on_a_gpu(learner), TrainerProgress())
    load_part(on_cuda, learner)
    load_part(on_cpu, on_a_gpu(learner))
    assert restored == []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(16, dtype=torch.uint8))
    load_part(on_cuda, on_a_gpu(learner))
    assert torch.equal(restored[0], torch.arange(16, dtype=torch.uint8))


def test_a_checkpoint_of_another_model_is_refused(tiny_models: dict[str, Path], make_learner, tmp_path: Path) -> None:
    save_part(tmp_path, make_learner(tiny_models["tied"]), TrainerProgress())
    with pytest.raises(CheckpointError, match=r"does not fit model\.name"):
        load_part(tmp_path, make_learner(tiny_models["untied"]))


def test_a_checkpoint_without_its_files_is_refused(tiny_model: Path, make_learner, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        load_part(tmp_path, make_learner(tiny_model))


def test_an_optimizer_that_is_skipped_starts_like_a_new_one(tiny_model: Path, make_learner, oracle, tmp_path: Path) -> None:
    first = make_learner(tiny_model, loss=DefaultLossConfig(), lr=1e-2)
    train(first, oracle, range(1, 4))
    save_part(tmp_path, first, TrainerProgress(step=3))
    second = make_learner(tiny_model, loss=DefaultLossConfig(), lr=1e-2)
    assert load_part(tmp_path, second, skip_optimizer=True).step == 3
    for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    (before, *_), (now, *_) = first.model.parameters(), second.model.parameters()
    train(second, oracle, range(4, 5))
    # AdamW's first step moves every parameter that has a gradient by the learning rate, whatever the gradient's size.
    moved = (gather_tensor(now) - gather_tensor(before)).abs().max()
    torch.testing.assert_close(moved, torch.tensor(1e-2), rtol=1e-3, atol=0)


def test_a_parameter_that_never_had_a_gradient_has_no_moments_after_a_reload_either(
    tiny_model: Path, make_learner, oracle, tmp_path: Path
) -> None:
    unbroken = make_learner(tiny_model, loss=DefaultLossConfig(), lr=1e-2)
    train(unbroken, oracle, range(1, 2))
    del unbroken.optimizer.state[list(unbroken.model.parameters())[3]]
    save_part(tmp_path, unbroken, TrainerProgress(step=1))
    second = make_learner(tiny_model, loss=DefaultLossConfig(), lr=1e-2)
    assert load_part(tmp_path, second) == TrainerProgress(step=1)
    assert list(second.model.parameters())[3] not in second.optimizer.state
    assert len(second.optimizer.state) == len(list(second.model.parameters())) - 1
    assert train(second, oracle, range(2, 4)) == train(unbroken, oracle, range(2, 4))


def test_an_optimizer_without_state_is_reloaded(tiny_model: Path, make_learner, oracle, tmp_path: Path) -> None:
    first, second = (make_learner(tiny_model, loss=DefaultLossConfig(), lr=1e-2) for _ in range(2))
    for learner in (first, second):
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1e-2)
    train(first, oracle, range(1, 2))
    save_part(tmp_path, first, TrainerProgress(step=1))
    load_part(tmp_path, second)
    assert train(first, oracle, range(2, 4)) == train(second, oracle, range(2, 4))


def test_what_is_to_be_left_behind_starts_anew_and_steps_go_on() -> None:
    saved = TrainerProgress(step=7, total_tokens=70, total_samples=14, schedule_start=2, data_start=3)
    assert progress_to_resume(saved, CkptConfig()) == saved
    anew = progress_to_resume(saved, CkptConfig(skip_progress=True, skip_scheduler=True, skip_dataloader=True))
    assert anew == TrainerProgress(step=7, schedule_start=7, data_start=7)
