"""Copies tensors of a GPU to main memory while the GPU goes on computing. Used by `trainer.model.export`.

What is for a GPU here has not run on one yet.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

_MAX_IN_FLIGHT_BYTES = 1 << 30
"""Bytes of sources that wait on the GPU for their copies. A sharded model is gathered faster than it is copied, and would be there
whole. Copying 1 GiB takes an estimated 40 ms at 25 GB/s, in which the next tensors are gathered, so the copies should not pause."""


class CopyEvent(Protocol):
    """An event of a stream."""

    def synchronize(self) -> None:
        """Return once the stream has come to it."""
        ...


class CopiesInFlight:
    """Bounds the bytes of sources that are kept on the device until they are copied."""

    def __init__(self, *, max_bytes: int) -> None:
        """Begin with none."""
        self._max_bytes = max_bytes
        self._copies: deque[tuple[CopyEvent, int]] = deque()
        self._num_bytes = 0

    def add(self, copied: CopyEvent, *, num_bytes: int) -> None:
        """Note a copy that was begun, and wait for the oldest ones while there are too many bytes. One copy is always allowed.

        Args:
            copied: comes once the source has been copied.
        """
        self._copies.append((copied, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and len(self._copies) > 1:
            oldest, freed = self._copies.popleft()
            oldest.synchronize()
            self._num_bytes -= freed


class HostCopies:
    """Copies on a stream of their own. On the CPU a copy is done when it is started."""

    def __init__(self, device: torch.device) -> None:
        """Open the stream.

        Args:
            device: the device of the tensors that are copied.
        """
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight = CopiesInFlight(max_bytes=_MAX_IN_FLIGHT_BYTES)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a copy: page-locked where there is a GPU, which can copy to no other while it computes."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def start(self, target: torch.Tensor, source: torch.Tensor, *, does_change: bool) -> None:
        """Start to copy `source`, once the current stream has computed it, into `target`, which `empty` made.

        Args:
            does_change: later computing changes `source`, and must not overtake the copy.
        """
        if self._stream is None or not source.is_cuda:
            target.copy_(source)
            return
        current = torch.cuda.current_stream(source.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if does_change:
            current.wait_stream(self._stream)
        else:
            source.record_stream(self._stream)  # its memory is free once it is copied
            self._in_flight.add(self._stream.record_event(), num_bytes=source.nbytes)

    def wait(self) -> None:
        """Return once every copy that was started has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
