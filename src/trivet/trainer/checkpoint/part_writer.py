"""Writes the trainer part of a checkpoint while the next step computes, then runs the work that makes it count.

Called by `trainer.checkpoint.saver`.

consumes: the learner's state of one step; in host memory it is read in place until `release`
produces: the part's files, then what `on_written` produces (on the main rank: mark, commit)
waits for: the write before it, in `start` and `work.wait`; its thread waits for the other ranks' threads
unblocked by: the disk; the ranks' group gives up after `timeout_s`
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from trivet.storage.durable import FileRecord
from trivet.trainer.background import Background
from trivet.trainer.checkpoint.snapshot import Snapshot, TensorKey
from trivet.trainer.checkpoint.state import State, write_state
from trivet.trainer.ranks.world import World, open_group

OnWritten = Callable[[Mapping[str, FileRecord]], None]
"""Receives the records of every rank's shards on the main rank, nothing on the others."""


class PartWriter:
    """A thread that writes at most one part at a time."""

    def __init__(self, world: World, *, is_async: bool, timeout_s: float) -> None:
        """Open a group of all ranks for the writing threads. Collective.

        Args:
            is_async: `start` returns while the part is written; otherwise it returns once all is done.
            timeout_s: longest wait of one rank's thread for another's.
        """
        # The steps use their own group meanwhile, and one group must not carry two exchanges at the same time.
        self._group = open_group(world, timeout_s=timeout_s)
        self._is_async = is_async
        self._stager = _gpu_stager() if world.device.type == "cuda" else None
        self.work = Background("checkpoint-writer", is_async=is_async)
        self._snapshot: Snapshot | None = None
        self._buffers: dict[TensorKey, torch.Tensor] = {}

    def start(self, directory: Path, state: State, *, on_written: OnWritten) -> None:
        """Begin to write `state` once the write before it has ended. Collective.

        Args:
            directory: exists and is empty.
            state: must not change before `release` returns.
            on_written: runs on the writing thread once every rank's shards are written.

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
        self.work.start(lambda: on_written(write_state(directory, state, self._group, hold=hold)))

    def release(self) -> None:
        """Return once the learner may change: tensors that are not being written by now are copied."""
        running = self.work.running
        if self._snapshot is not None and running is not None and not running.done():
            self._snapshot.detach()

    def close(self) -> None:
        """Wait for a running write to end, without raising its error. May be called again."""
        self.work.close()
        if self._stager is not None:
            self._stager.close()


def _gpu_stager() -> DefaultStager:
    """Make the copier from GPU memory to pinned memory, which the next copy uses again.

    A GPU's memory changes before a disk could read it.
    """
    return DefaultStager(
        StagingOptions(use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True)
    )
