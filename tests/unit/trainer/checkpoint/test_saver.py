import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from trivet.checkpoints.commit import committed_steps, verify_checkpoint
from trivet.checkpoints.parts import ORCHESTRATOR, PARTS, TRAINER, begin_part, finish_part
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import CheckpointError, DiskFull, WeightsError
from trivet.storage.durable import FileRecord
from trivet.trainer.checkpoint import shard_file
from trivet.trainer.checkpoint.saver import CheckpointSaver
from trivet.trainer.checkpoint.shard_file import write_direct
from trivet.trainer.checkpoint.state import TrainerProgress, load_part
from trivet.trainer.ranks.world import gather_tensor
from trivet.trainer.step import Learner, train_step
from trivet.wire.events import Commit
from trivet.wire.versions import Step


@pytest.fixture
def learner(make_learner, tiny_model: Path) -> Learner:
    return make_learner(tiny_model)


@pytest.fixture
def saver(world, telemetry, tiny_model: Path, tmp_path: Path) -> Iterator[CheckpointSaver]:
    config = TrainerConfig.model_validate(
        {"output_dir": tmp_path, "model": {"name": str(tiny_model)}, "ckpt": {"keep_last": 2}}
    )
    saver = CheckpointSaver(config=config, layout=RunLayout(tmp_path), world=world, num_bytes=1, telemetry=telemetry)
    yield saver
    saver.close()


def save(saver: CheckpointSaver, learner: Learner, step: int, *, policy: Future[None] | None = None) -> None:
    saver.save(Step(step), learner, TrainerProgress(step=step), parts=(TRAINER,), policy=policy)


def test_a_checkpoint_is_committed_after_it_is_written_and_recorded(saver: CheckpointSaver, learner: Learner) -> None:
    save(saver, learner, 1)
    assert saver.newest_begun == 1
    saver.wait()
    verify_checkpoint(saver.layout, Step(1))
    (event,) = saver.telemetry.events
    assert isinstance(event, Commit)
    assert event.step == 1


def test_both_parts_are_committed_together(saver: CheckpointSaver, learner: Learner) -> None:
    (begin_part(saver.layout, Step(1), ORCHESTRATOR) / "state").write_text("x")
    finish_part(saver.layout, Step(1), ORCHESTRATOR)
    saver.save(Step(1), learner, TrainerProgress(step=1), parts=PARTS, policy=None)
    saver.wait()
    verify_checkpoint(saver.layout, Step(1))


def test_without_the_other_part_nothing_is_committed(saver: CheckpointSaver, learner: Learner) -> None:
    saver.save(Step(1), learner, TrainerProgress(step=1), parts=PARTS, policy=None)
    with pytest.raises(CheckpointError, match="lacks the part of the orchestrator"):
        saver.wait()
    assert committed_steps(saver.layout) == []


def test_a_commit_waits_for_the_policy_of_its_step(saver: CheckpointSaver, learner: Learner) -> None:
    policy: Future[None] = Future()
    save(saver, learner, 1, policy=policy)
    saver.raise_failure()  # nothing to tell yet, and it does not wait
    assert committed_steps(saver.layout) == []
    policy.set_result(None)
    saver.wait()
    assert committed_steps(saver.layout) == [1]


def test_a_checkpoint_whose_policy_failed_is_not_committed(saver: CheckpointSaver, learner: Learner) -> None:
    policy: Future[None] = Future()
    policy.set_exception(WeightsError("no policy"))
    save(saver, learner, 1, policy=policy)
    with pytest.raises(WeightsError, match="no policy"):
        saver.wait()
    assert committed_steps(saver.layout) == []


def test_old_checkpoints_go_after_a_commit(saver: CheckpointSaver, learner: Learner) -> None:
    for step in (1, 2, 3):
        save(saver, learner, step)
    saver.wait()
    assert committed_steps(saver.layout) == [2, 3]


def test_without_room_on_the_disk_nothing_is_begun(
    saver: CheckpointSaver, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.disk_usage(saver.layout.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: whole._replace(free=0))
    with pytest.raises(DiskFull, match="the trainer's part of checkpoint 1"):
        save(saver, learner, 1)
    assert saver.newest_begun is None


def test_a_checkpoint_has_the_state_of_its_own_step_whatever_the_learner_does_meanwhile(
    saver: CheckpointSaver, tiny_model: Path, make_learner, oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def write_late(path: Path, content: torch.Tensor) -> FileRecord:
        assert may_write.wait(30)
        return write_direct(path, content)

    def train(learner: Learner, step: int) -> list[torch.Tensor]:
        train_step(learner, [oracle.make_row(oracle.make_examples(count=4, vocab_size=100, seed=step))], step=step)
        return [gather_tensor(parameter).detach().clone() for parameter in learner.model.parameters()]

    monkeypatch.setattr(shard_file, "write_direct", write_late)
    learner, expected = make_learner(tiny_model, lr=1e-2), {}
    for step in (1, 2):
        may_write.clear()
        expected[step] = train(learner, step)
        save(saver, learner, step)
        after = train(learner, step + 1)
        saver.raise_failure()
        assert step not in committed_steps(saver.layout)
        may_write.set()
        saver.wait()
    resumed = learner
    for step, parameters in expected.items():
        resumed = make_learner(tiny_model, lr=1e-2)
        assert load_part(saver.layout.checkpoint_step(step) / TRAINER, resumed).step == step
        found = [gather_tensor(parameter) for parameter in resumed.model.parameters()]
        assert all(map(torch.equal, found, parameters))
    assert all(map(torch.equal, train(resumed, 3), after)), "the optimizer's state is that of the step, too"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_failed_write_is_raised_once_and_nothing_is_committed(
    saver: CheckpointSaver, learner: Learner, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(shard_file, "write_direct", fail)
    saver.work._is_async = is_async
    if is_async:
        save(saver, learner, 1)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        saver.wait() if is_async else save(saver, learner, 1)
    saver.raise_failure()
    assert committed_steps(saver.layout) == []
