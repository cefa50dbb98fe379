"""Keeps the tensors of one moment readable for a writing thread while the learner that owns them computes the next step.

Used by `trainer.checkpoint.part_writer`. Between two updates nothing that a checkpoint holds changes, so for that long it needs no
copy. Before the next update the learner has everything copied that is not written yet. Only for tensors in host memory.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

TensorKey = tuple[int, int]
"""Address and size in bytes of a tensor's memory."""


class Snapshot:
    """The tensors of one moment. Two threads share it: one calls `hold` once for each tensor, the other may call `detach`."""

    def __init__(self, state: object, *, buffers: dict[TensorKey, torch.Tensor]) -> None:
        """Take the snapshot; nothing is copied yet.

        Args:
            state: tensors in nested dicts and lists; of a DTensor the part of this rank counts.
            buffers: memory for the copies, which the caller keeps for the next snapshot of the same tensors. No other snapshot may
                be using it. Buffers of tensors that are not in `state` any more are freed.
        """
        with torch.no_grad():
            self._pending = {_key(tensor): tensor for tensor in _tensors_in(state) if tensor.numel() > 0}
        for key in buffers.keys() - self._pending.keys():
            del buffers[key]
        self._buffers = buffers
        self._copied: set[TensorKey] = set()
        self._held: set[TensorKey] = set()
        self._is_detached = False
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give `tensor` as it was when the snapshot was made; `detach` waits until it is released."""
        key = _key(tensor)
        with self._changed:
            is_copied = key in self._copied
            is_as_it_was = not self._is_detached or is_copied or tensor.numel() == 0
            assert is_as_it_was, f"a tensor of {tuple(tensor.shape)} is not one of the snapshot's, or was held before"
            if not is_copied:
                self._held.add(key)
        try:
            yield self._buffers[key] if is_copied else tensor
        finally:
            with self._changed:
                self._pending.pop(key, None)
                self._held.discard(key)
                self._changed.notify_all()

    def detach(self) -> None:
        """Copy the tensors that were not held yet; return once all tensors may change."""
        with self._changed:
            self._is_detached = True
            for key, tensor in self._pending.items():
                if key not in self._held and key not in self._copied:
                    self._copy(key, tensor)
            self._changed.wait_for(lambda: not self._held)

    def _copy(self, key: TensorKey, tensor: torch.Tensor) -> None:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.dtype != tensor.dtype or buffer.shape != tensor.shape:
            self._buffers[key] = buffer = torch.empty_like(tensor)
        with torch.no_grad():
            buffer.copy_(tensor)
        self._copied.add(key)


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, DTensor):
        yield state.to_local()
    elif isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors_in(value)


def _key(tensor: torch.Tensor) -> TensorKey:
    return tensor.data_ptr(), tensor.nbytes
