"""Moves the data of a step between main memory and the device.

While the host waits for a GPU it queues nothing, and the GPU then idles. So a step waits in two functions of this module and
nowhere else: in `read_numbers` before the update, because a loss that is not finite must not reach the parameters, and in
`read_values` at the end. Until then the values of all rows stay on the device: they are a few floats a token, where the activations
of a token are thousands. `HostCopies` copies weights for `trainer.model.export` while the GPU goes on computing.

The code for GPUs has not run on one yet.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

_MAX_IN_FLIGHT_BYTES = 1 << 30
"""Bytes of sources that wait on the GPU for their copies. A sharded model is gathered faster than it is copied, and would be there
whole. Copying 1 GiB takes an estimated 40 ms at 25 GB/s, in which the next tensors are gathered, so the copies should not pause."""


class Selected(NamedTuple):
    """Values, and a mask that is true where they count. The host selects them later: on a GPU it would wait for their number."""

    values: torch.Tensor
    is_selected: torch.Tensor
    """bool, in the shape of `values`."""


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `values` on `device`. A copy to a GPU goes through page-locked memory, so the host does not wait for it."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def read_numbers(*numbers: torch.Tensor) -> list[float]:
    """Return scalar tensors as floats, with one wait for all of them."""
    device = numbers[-1].device  # with off-loaded parameters the norm of the gradients is in main memory, and the loss is not
    found: list[float] = torch.stack([number.to(device, torch.float64) for number in numbers]).tolist()
    return found


def read_values(parts: Sequence[Mapping[str, torch.Tensor | Selected]]) -> dict[str, np.ndarray]:
    """Return the values of each name in all `parts`, one part after the other, with one wait for all of them."""
    names = list({name: None for part in parts for name in part})
    columns: dict[str, list[torch.Tensor]] = {}
    for name in names:
        entries = [part[name] for part in parts if name in part]
        pairs = [entry if isinstance(entry, Selected) else (entry,) for entry in entries]
        columns[name] = [torch.cat(list(column)) for column in zip(*pairs, strict=True)]
    hosts = {
        name: [copy_to_host(tensor) if tensor.is_cuda else tensor for tensor in column] for name, column in columns.items()
    }
    for device in {tensor.device for column in columns.values() for tensor in column if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    arrays = {name: [host.numpy() for host in column] for name, column in hosts.items()}
    return {name: column[0] if len(column) == 1 else column[0][column[1]] for name, column in arrays.items()}


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to main memory, and return it. One from a GPU is complete only after its stream has been waited for."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; return other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HostCopies:
    """Copies on a stream of their own. On the CPU a copy is done when it is started."""

    def __init__(self, device: torch.device, *, max_bytes: int = _MAX_IN_FLIGHT_BYTES) -> None:
        """Open a stream for copies from `device`, which keeps sources of at most `max_bytes` until they are copied."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._max_bytes = max_bytes
        self._in_flight: deque[tuple[torch.cuda.Event, int]] = deque()
        """The event after each copy, and the bytes that are free once it has come."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a copy: page-locked where there is a GPU, which can copy to no other while it computes."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def start(self, target: torch.Tensor, source: torch.Tensor, *, does_change: bool) -> None:
        """Start to copy `source`, once the current stream has computed it, into `target`, which `empty` made.

        `does_change` says that later computing changes `source`, and must not overtake the copy.
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
            copied = torch.cuda.Event()
            copied.record(self._stream)
            self.keep_in_flight(copied, num_bytes=source.nbytes)

    def keep_in_flight(self, copied: torch.cuda.Event, *, num_bytes: int) -> None:
        """Wait for the oldest copies while there are too many bytes. One copy may always be in flight."""
        self._in_flight.append((copied, num_bytes))
        while len(self._in_flight) > 1 and sum(size for _, size in self._in_flight) > self._max_bytes:
            self._in_flight.popleft()[0].synchronize()

    def wait(self) -> None:
        """Return once every copy that was started has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
