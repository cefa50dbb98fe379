"""Writes the trainer's part of a checkpoint while the next step computes, and then runs what makes it count.

consumes: the learner's state of one step; in host memory it is read from where it lies until `release`
produces: the part's files, then whatever `then` does (on the main rank: mark, commit)
waits for: the write before it, in `start` and `work.wait`; its thread waits for the other ranks' threads
unblocked by: the disk; the ranks' group gives up after `timeout_s`
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from trivet.durable import FileRecord
from trivet.trainer.background import Background
from trivet.trainer.checkpoint.snapshot import Snapshot, TensorKey
from trivet.trainer.checkpoint.state import State, write_state
from trivet.trainer.ranks.world import World, open_group

Then = Callable[[Mapping[str, FileRecord]], None]
"""Receives the records of every rank's shards on the main rank, nothing on the others."""


class PartWriter:
    """At most one part is being written.

    >>> writer = PartWriter(world, is_async=True, timeout_s=1800)
    >>> writer.start(directory, state_of(learner, progress), then=commit_it)
    >>> writer.release()  # before the learner changes
    >>> writer.work.wait()
    >>> writer.close()
    """

    def __init__(self, world: World, *, is_async: bool, timeout_s: float) -> None:
        """Collective.

        Args:
            is_async: return while it is written; else `start` returns once all is done.
            timeout_s: longest wait of one rank's thread for another's.
        """
        # The steps' own group must not carry a second conversation at the same time.
        self._group = open_group(world, timeout_s=timeout_s)
        self._is_async = is_async
        self._stager = _gpu_stager() if world.device.type == "cuda" else None
        self.work = Background("checkpoint-writer", is_async=is_async)
        self._snapshot: Snapshot | None = None
        self._buffers: dict[TensorKey, torch.Tensor] = {}

    def start(self, directory: Path, state: State, *, then: Then) -> None:
        """Collective.

        Args:
            directory: exists, empty.
            state: not to be changed before `release` returns.
            then: runs on the writing thread once every rank's shards are written.

        Raises:
            CheckpointError: the write before this one failed, or, unless asynchronous, this one.
        """
        self.work.wait()
        self._snapshot = None
        if self._is_async and self._stager is not None:
            staged = self._stager.stage(state)
            assert isinstance(staged, dict)
            state = staged
        elif self._is_async:
            self._snapshot = Snapshot(state, buffers=self._buffers)
        hold = nullcontext if self._snapshot is None else self._snapshot.hold
        self.work.start(lambda: then(write_state(directory, state, self._group, hold=hold)))

    def release(self) -> None:
        """Returns once the learner may change: what is not on its way to the disk by now is copied."""
        running = self.work.running
        if self._snapshot is not None and running is not None and not running.done():
            self._snapshot.detach()

    def close(self) -> None:
        """Let a write that is under way end, without raising what it met. May be called again."""
        self.work.close()
        if self._stager is not None:
            self._stager.close()


def _gpu_stager() -> DefaultStager:
    """Copies to pinned memory, which the next copy uses again: what a GPU holds changes before a disk could read it."""
    return DefaultStager(
        StagingOptions(use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True)
    )
