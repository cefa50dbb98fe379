"""Run two real ranks that fail, wait, or write a checkpoint during their steps.

Each test names the function that its ranks run, in processes of their own (`support.ranks`).
"""

import errno
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from support.processes import find_free_port
from support.ranks import run_ranks
from support.scripts import load_module
from trivet.checkpoints.commit import TRAINER, begin_part, committed_steps
from trivet.config.layout import SECRET_FILE, RunLayout
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import AdamWConfig
from trivet.errors import BatchError, CheckpointError, UnknownRank
from trivet.process.sockets import RankPlace
from trivet.secret import RunSecret, make_secret
from trivet.storage.durable import FileRecord, hash_file, list_files
from trivet.trainer.background import BackgroundWriter
from trivet.trainer.checkpoint import shard_file
from trivet.trainer.checkpoint.shard_file import ShardFile, write_direct
from trivet.trainer.checkpoint.state import TrainerProgress, collect_state, load_part
from trivet.trainer.loop import extend_wait_of_ranks, receive
from trivet.trainer.losses.formulas import cross_entropy
from trivet.trainer.model.export import Exporter
from trivet.trainer.open_session import open_session
from trivet.trainer.ranks.world import World, barrier, open_group, open_world, sum_over_ranks
from trivet.trainer.step import Learner, train_step
from trivet.weights.catalog import published_versions
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.versions import GroupId, Step

FAILED, LOST = 5, 7
"""Exit codes of ranks that fail, and of one that is lost."""
HERE = Path(__file__).parent
ORACLE = HERE.parent / "unit" / "trainer" / "oracle.py"


_may_write = threading.Event()
_write = Exporter.write


def write_slowly(exporter: Exporter, directory: Path, weights: dict[str, torch.Tensor]) -> None:
    assert _may_write.wait(240)
    _write(exporter, directory, weights)


def fail_in_step_2(model_dir: str, output_dir: str) -> None:
    """Meet an error while rank 0 still writes policy and checkpoint of step 1, and look at the end whether they have arrived."""
    torch.set_num_threads(1)
    model = {"name": model_dir, "seq_len": 32, "compute_dtype": "float32"}
    values = {"max_steps": 2, "output_dir": output_dir, "model": model, "data": {"type": "fake"}}
    config, layout = SftConfig.model_validate(values), RunLayout(Path(output_dir))
    with open_world(device="cpu", timeout_s=120) as world, patch.object(Exporter, "write", write_slowly):
        try:
            with open_session(config, world, loss=cross_entropy, role="sft", keep_recent=0) as session:
                assert not any(layout.checkpoints.glob(".*")), "what was never committed is still there"
                session.progress.step = 1
                session.publish(Step(1))
                session.save(Step(1), parts=(TRAINER,))
                with session.failing_together():
                    if world.is_main:
                        assert published_versions(layout) == []
                    threading.Timer(1.0, _may_write.set).start()
                    raise BatchError("step 2")
        except BatchError:
            assert published_versions(layout) == [1]
            assert committed_steps(layout) == [1]
            os._exit(FAILED)


def test_ranks_that_fail_end_after_the_last_policy_and_checkpoint_have_arrived(tiny_model: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "outputs"
    begin_part(RunLayout(output_dir), Step(4), TRAINER)  # of a run that was killed
    run_ranks(2, fail_in_step_2, [str(tiny_model), str(output_dir)], logs=tmp_path, codes=[FAILED, FAILED])


def fail_alone() -> None:
    """Fail on rank 1 while rank 0 waits for it in a collective.

    Ending a process group waits for the other ranks here, as NCCL's shutdown does and gloo's does not.
    """
    dist.destroy_process_group = dist.barrier
    with open_world(device="cpu", timeout_s=600) as world:  # as long as the timeout of a collective in a run, by default
        if world.rank == 1:
            raise RuntimeError("this rank has failed")
        sum_over_ranks(world, torch.ones(1))


def test_a_rank_that_fails_says_why_at_once_on_a_backend_whose_shutdown_waits_for_the_others(tmp_path: Path) -> None:
    run_ranks(2, fail_alone, [], logs=tmp_path, codes=[1, 1], timeout_s=60)
    assert "this rank has failed" in (tmp_path / "rank_1_of_2.log").read_text()


GROUP_TIMEOUT_S = 5.0
BATCH = Batch(step=Step(3), purpose=BatchPurpose.TRAIN, micro_batches=[], group_ids=[GroupId(7)], num_rollouts=1)


class LateBatch:
    """A BatchReceiver that waits as the real one does."""

    def __init__(self, world: World) -> None:
        self._world = world

    def receive(self, step: Step) -> Batch:
        until = time.monotonic() + 1.5 * GROUP_TIMEOUT_S
        while time.monotonic() < until:
            time.sleep(GROUP_TIMEOUT_S / 10)
            extend_wait_of_ranks(self._world)
        return BATCH

    def close(self) -> None:
        pass


def receive_late() -> None:
    """Receive a batch that comes long after the ranks' connection has timed out."""
    with open_world(device="cpu", timeout_s=120) as world:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        assert isinstance(group, dist.ProcessGroup)
        world = replace(world, control=group)
        assert receive(world, LateBatch(world) if world.is_main else None, Step(3)) == BATCH


def test_ranks_wait_for_a_batch_as_long_as_rank_0_does(tmp_path: Path) -> None:
    run_ranks(2, receive_late, [], logs=tmp_path)


class Case:
    def __init__(self, model_dir: str, directory: Path, world: World) -> None:
        self.model_dir, self.directory, self.world = model_dir, directory, world
        self.program = load_module(HERE / "test_trainer_ranks.py")
        self.oracle = load_module(ORACLE)
        self.learner = self.make_learner()
        self.file, self.group = ShardFile(world), open_group(world, timeout_s=60)
        self.work = BackgroundWriter("checkpoint-writer")
        self.written: list[dict[str, FileRecord]] = []

    def make_learner(self) -> Learner:
        return self.program.make_learner(
            self.model_dir, self.world, optim=AdamWConfig(lr=1e-2), loss=self.program.LOSSES["token"]
        )

    def train(self, step: int) -> None:
        rows = [self.oracle.make_row([example]) for example in self.oracle.make_examples(count=4, vocab_size=100, seed=step)]
        train_step(self.learner, rows, step=Step(step))

    def start(self, name: str, step: int) -> Path:
        part = self.directory / name
        if self.world.is_main:
            part.mkdir()
        barrier(self.world)
        self.file.copy(part, collect_state(self.learner, TrainerProgress(step=step)))
        self.work.start(lambda: self.written.append(self.file.write(self.group)))
        return part


def parts_of(learner: Learner) -> list[torch.Tensor]:
    """Return this rank's parts of everything that is saved."""
    state = collect_state(learner, TrainerProgress())
    tensors = [*state["model"].values(), *(value for each in state["optimizer"]["state"].values() for value in each.values())]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone() for tensor in tensors]


def write_later(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 1 write two steps later than rank 0. Both must write the step before."""
    may_write = threading.Event()

    def slow(path: Path, content: torch.Tensor) -> FileRecord:
        assert may_write.wait(60)
        return write_direct(path, content)

    case.train(1)
    expected = parts_of(case.learner)
    with monkeypatch.context() as patch:
        if not case.world.is_main:
            patch.setattr(shard_file, "write_direct", slow)
        part = case.start("slow", 1)
        case.train(2)
        case.train(3)
        case.work.raise_failure()
        assert case.written == [], "no rank is done before the last has written"
        may_write.set()
        case.work.wait()
    names = ["__0_0.distcp", "__1_0.distcp"]
    assert list_files(part) == [".metadata", *names]
    assert case.written == [{name: hash_file(part / name) for name in names}]
    resumed = case.make_learner()
    assert load_part(part, resumed).step == 1
    assert all(map(torch.equal, parts_of(resumed), expected))


def write_without_room(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell every rank of the rank that failed, and go on to end."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    case.written.clear()
    with monkeypatch.context() as patch:
        if not case.world.is_main:
            patch.setattr(shard_file, "write_direct", fail)
        case.start("full", 3)
        with pytest.raises(CheckpointError, match=r"rank 1: OSError: \[Errno 28\] No space left on device"):
            case.work.wait()
    assert case.written == []


def write_alone(case: Case) -> None:
    """Lose rank 1 in the middle of the write, and let rank 0 learn of it."""
    case.start("alone", 3)
    with pytest.raises(RuntimeError):
        case.work.wait()
    assert case.written == []


def write_parts(model_dir: str, directory: str) -> None:
    """Write a part that rank 1 is slow to write, one that rank 1 has no room for, and one that rank 1 does not live to write."""
    torch.set_num_threads(1)
    monkeypatch = pytest.MonkeyPatch()
    with open_world(device="cpu", timeout_s=120) as world:
        case = Case(model_dir, Path(directory), world)
        write_later(case, monkeypatch)
        write_without_room(case, monkeypatch)
        if not world.is_main:
            monkeypatch.setattr(shard_file, "write_direct", lambda *_: os._exit(LOST))
        write_alone(case)
        case.work.close()
        Path(directory, "ended").touch()
        os._exit(0)  # the rest of the group waits for the lost rank


def test_a_rank_that_is_slow_or_fails_leaves_no_wrong_checkpoint_and_nobody_waiting(tiny_model: Path, tmp_path: Path) -> None:
    run_ranks(2, write_parts, [str(tiny_model), str(tmp_path)], logs=tmp_path, codes=[0, LOST])
    assert (tmp_path / "ended").exists()


def open_with_another_secret() -> None:
    """Open the world. Rank 1 knows where the other rank listens, but not the run's secret."""
    with patch(
        "trivet.trainer.ranks.world.read_secret", lambda path: RunSecret(bytes(32)) if is_stranger() else make_secret(path)
    ):
        try:
            with open_world(device="cpu", timeout_s=60):
                said = "opened"
        except UnknownRank as exc:
            said = str(exc)
    print(said)


def is_stranger() -> bool:
    return os.environ["RANK"] == "1"


def test_a_rank_without_the_secret_is_refused_by_the_other(tmp_path: Path) -> None:
    """Ranks of several nodes find a process that takes the place of one before anything from it is read."""
    place = RankPlace(first_rank=0, num_ranks=2, host="127.0.0.1", port=find_free_port(), attempt=1)
    make_secret(tmp_path / "secret")
    variables = place.environment() | {SECRET_FILE: str(tmp_path / "secret")}
    run_ranks(2, open_with_another_secret, [], logs=tmp_path, timeout_s=240, variables=variables)
    assert "what connected as rank 1 of 2 of the trainer does not have" in (tmp_path / "rank_0_of_2.log").read_text()
