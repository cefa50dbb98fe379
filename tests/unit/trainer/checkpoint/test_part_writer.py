"""A part has the state of its own step, whatever the learner does meanwhile. A failed write is reported."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trivet.config.schema.trainer import GrpoLossConfig
from trivet.errors import CheckpointError
from trivet.storage.durable import FileRecord, hash_file
from trivet.trainer.checkpoint import part_writer
from trivet.trainer.checkpoint.part_writer import PartWriter
from trivet.trainer.checkpoint.state import TrainerProgress, load_part, state_of, write_state
from trivet.trainer.model.reference import Reference
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.step import Learner, train_step


@pytest.fixture
def writer(world) -> Iterator[PartWriter]:
    writer = PartWriter(world, is_async=True, timeout_s=30)
    yield writer
    writer.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold back every write to disk until the event is set."""
    gate = threading.Event()

    def slow(directory, state, group, *, hold) -> dict:
        assert gate.wait(30)
        return write_state(directory, state, group, hold=hold)

    monkeypatch.setattr(part_writer, "write_state", slow)
    return gate


def train(learner: Learner, oracle, step: int) -> None:
    train_step(learner, [oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=step))], step=step)


def parameters_of(learner: Learner) -> list[torch.Tensor]:
    return [gather_tensor(parameter).detach().clone() for parameter in learner.model.parameters()]


def test_a_step_taken_during_the_write_is_not_in_it(
    tiny_model: Path, make_learner, oracle, writer: PartWriter, gate: threading.Event, tmp_path: Path
) -> None:
    learner = make_learner(tiny_model, lr=1e-2)
    learner.before_update = writer.release
    train(learner, oracle, 1)
    expected, written = parameters_of(learner), list[str]()
    writer.start(tmp_path, state_of(learner, TrainerProgress(step=1)), on_written=lambda _: written.append("done"))
    train(learner, oracle, 2)
    writer.work.raise_failure()
    assert written == []
    gate.set()
    writer.work.wait()
    assert written == ["done"]
    resumed = make_learner(tiny_model, lr=1e-2)
    assert load_part(tmp_path, resumed).step == 1
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters_of(resumed), expected, strict=True))
    train(resumed, oracle, 2)
    both = zip(parameters_of(resumed), parameters_of(learner), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in both)


def test_the_reference_that_is_lent_to_the_model_during_the_write_is_not_in_it(
    tiny_model: Path,
    make_learner,
    oracle,
    writer: PartWriter,
    gate: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = make_learner(tiny_model, loss=GrpoLossConfig(beta=0.5), lr=1e-2)
    reference = learner.reference = Reference(learner.model)
    learner.before_update = writer.release
    train(learner, oracle, 1)
    expected, written, score = parameters_of(learner), threading.Event(), reference.score

    def score_while_it_is_written(model, rows):
        with reference._lent_to(model):
            gate.set()
            assert written.wait(30)
        return score(model, rows)

    monkeypatch.setattr(reference, "score", score_while_it_is_written)
    writer.start(tmp_path, state_of(learner, TrainerProgress(step=1)), on_written=lambda _: written.set())
    train(learner, oracle, 2)
    writer.work.wait()
    resumed = make_learner(tiny_model)
    load_part(tmp_path, resumed)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters_of(resumed), expected, strict=True))


def test_writes_that_the_learner_overtakes_are_each_of_their_own_step(
    tiny_model: Path, make_learner, oracle, writer: PartWriter, gate: threading.Event, tmp_path: Path
) -> None:
    learner = make_learner(tiny_model, lr=1e-2)
    learner.before_update = writer.release
    expected = {}
    train(learner, oracle, 0)
    for step in (1, 2, 3):
        gate.clear()
        (tmp_path / str(step)).mkdir()
        expected[step] = parameters_of(learner)
        writer.start(tmp_path / str(step), state_of(learner, TrainerProgress(step=step)), on_written=lambda _: None)
        train(learner, oracle, step)
        gate.set()
        writer.work.wait()
    for step, parameters in expected.items():
        resumed = make_learner(tiny_model)
        assert load_part(tmp_path / str(step), resumed).step == step
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters_of(resumed), parameters, strict=True))


@pytest.mark.parametrize("is_async", [True, False])
def test_the_main_rank_is_told_the_digest_of_what_is_on_disk(
    tiny_model: Path, make_learner, world, tmp_path: Path, is_async: bool
) -> None:
    told, writer = dict[str, FileRecord](), PartWriter(world, is_async=is_async, timeout_s=30)
    writer.start(tmp_path, state_of(make_learner(tiny_model), TrainerProgress()), on_written=told.update)
    if is_async:
        writer.work.wait()
    writer.close()
    assert told == {"__0_0.distcp": hash_file(tmp_path / "__0_0.distcp")}


def test_a_failed_write_is_raised_between_steps_and_nothing_follows_it(
    tiny_model: Path, make_learner, world, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(directory, state, group, *, hold) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(part_writer, "write_state", fail)
    state, followed = state_of(make_learner(tiny_model), TrainerProgress()), list[str]()
    behind = PartWriter(world, is_async=True, timeout_s=30)
    behind.start(tmp_path, state, on_written=lambda _: followed.append("commit"))
    behind.close()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        behind.work.raise_failure()
    behind.work.raise_failure()  # told once
    at_once = PartWriter(world, is_async=False, timeout_s=30)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        at_once.start(tmp_path, state, on_written=lambda _: followed.append("commit"))
    at_once.close()
    assert followed == []


def test_a_directory_that_cannot_be_written_is_named(tiny_model: Path, make_learner, world, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises((CheckpointError, OSError), match="file"):
        write_state(blocked, state_of(make_learner(tiny_model), TrainerProgress()), world.control)
