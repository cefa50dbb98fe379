"""One rank of tests/integration/test_part_writer_ranks.py: `part_writer_program.py MODEL_DIR ORACLE DIRECTORY CODE`.

Writes a part that rank 1 is slow to write, one that rank 1 has no room for, and one that rank 1 does not live to write: it ends
with exit code CODE.
"""

import errno
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from trainer_rank_program import LOSSES, make_learner

from support.scripts import load_module
from trivet.config.schema.trainer import AdamWConfig
from trivet.errors import CheckpointError
from trivet.storage.durable import FileRecord, hash_file, list_files
from trivet.trainer.checkpoint import part_writer
from trivet.trainer.checkpoint.part_writer import PartWriter
from trivet.trainer.checkpoint.state import TrainerProgress, load_part, state_of, write_state
from trivet.trainer.ranks.world import World, barrier, open_world
from trivet.trainer.step import Learner, train_step
from trivet.wire.versions import Step


class Case:
    def __init__(self, model_dir: str, oracle_path: str, directory: Path, world: World) -> None:
        self.model_dir, self.directory, self.world = model_dir, directory, world
        self.oracle = load_module(Path(oracle_path))
        self.learner = self.make_learner()
        self.writer = PartWriter(world, is_async=True, timeout_s=60)
        self.learner.before_update = self.writer.release
        self.written: list[dict[str, FileRecord]] = []

    def make_learner(self) -> Learner:
        return make_learner(self.model_dir, self.world, optim=AdamWConfig(lr=1e-2), loss=LOSSES["token"])

    def train(self, step: int) -> None:
        rows = [self.oracle.make_row([example]) for example in self.oracle.make_examples(count=4, vocab_size=100, seed=step)]
        train_step(self.learner, rows, step=Step(step))

    def start(self, name: str, step: int) -> Path:
        part = self.directory / name
        if self.world.is_main:
            part.mkdir()
        barrier(self.world)
        state = state_of(self.learner, TrainerProgress(step=step))
        self.writer.start(part, state, on_written=lambda known: self.written.append(dict(known)))
        return part


def parts_of(learner: Learner) -> list[torch.Tensor]:
    """Return this rank's parts of everything that is saved."""
    state = state_of(learner, TrainerProgress())
    tensors = [*state["model"].values(), *(value for each in state["optimizer"]["state"].values() for value in each.values())]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone() for tensor in tensors]


def write_slowly(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 1 write two steps later than rank 0. Both must write the step before."""
    may_write = threading.Event()

    def slow(directory: Path, state: Any, group: Any, *, hold: Any = nullcontext) -> dict[str, FileRecord]:
        assert may_write.wait(60)
        return write_state(directory, state, group, hold=hold)

    case.train(1)
    expected = parts_of(case.learner)
    with monkeypatch.context() as patch:
        if not case.world.is_main:
            patch.setattr(part_writer, "write_state", slow)
        part = case.start("slow", 1)
        case.train(2)
        case.train(3)
        case.writer.work.raise_failure()
        assert case.written == [], "no rank is done before the last has written"
        may_write.set()
        case.writer.work.wait()
    names = ["__0_0.distcp", "__1_0.distcp"]
    assert list_files(part) == [".metadata", *names]
    assert case.written == [{name: hash_file(part / name) for name in names} if case.world.is_main else {}]
    resumed = case.make_learner()
    assert load_part(part, resumed).step == 1
    assert all(map(torch.equal, parts_of(resumed), expected))


def write_without_room(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell every rank of the rank that failed, and go on to end."""

    def fail(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    case.written.clear()
    with monkeypatch.context() as patch:
        if not case.world.is_main:
            patch.setattr(os, "pwritev", fail)
        case.start("full", 3)
        with pytest.raises(CheckpointError, match=r"rank 1: OSError: \[Errno 28\] No space left on device"):
            case.writer.work.wait()
    assert case.written == []


def write_alone(case: Case) -> None:
    """Lose rank 1 in the middle of the write, and let rank 0 learn of it."""
    case.start("alone", 3)
    with pytest.raises(RuntimeError):
        case.writer.work.wait()
    assert case.written == []


def main() -> None:
    model_dir, oracle_path, directory, code = sys.argv[1:]
    torch.set_num_threads(1)
    monkeypatch = pytest.MonkeyPatch()
    with open_world(device="cpu", timeout_s=120) as world:
        case = Case(model_dir, oracle_path, Path(directory), world)
        write_slowly(case, monkeypatch)
        write_without_room(case, monkeypatch)
        if not world.is_main:
            monkeypatch.setattr(os, "pwritev", lambda *_: os._exit(int(code)))
        write_alone(case)
        case.writer.close()
        Path(directory, "ended").write_text("well")
        # The rest of the group waits for the lost rank.
        os._exit(0)


if __name__ == "__main__":
    main()
