"""Moves the data of a step between main memory and the device.

While the host waits for a GPU it queues no work, and the GPU then idles. So a step waits only in two functions of this module: in
`read_numbers` before the update, because a loss that is not finite must not reach the parameters, and in `read_values` at the end.
Until then the values of all rows stay on the device: a few floats for each token, while its activations are thousands. `HostCopies`
copies weights for `trainer.model.export` while the GPU computes.

The code for GPUs has not run on one yet.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

_MAX_IN_FLIGHT_BYTES = 1 << 30
"""Most bytes that wait on the GPU to be copied. Without a limit a whole model would wait there, because gathering a sharded model
is faster than copying it. Copying 1 GiB takes an estimated 40 ms at 25 GB/s, enough to gather the next tensors."""


class Selected(NamedTuple):
    """Values, and a mask that is true where they count. The host selects them in `read_values`; before, it would wait for a GPU."""

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
    values: list[float] = torch.stack([number.to(device, torch.float64) for number in numbers]).tolist()
    return values


def read_values(parts: Sequence[Mapping[str, torch.Tensor | Selected]]) -> dict[str, np.ndarray]:
    """Concatenate the values of each name over all `parts`, and copy them to main memory with one wait for all of them."""
    names = list({name: None for part in parts for name in part})
    # The tensors of a name: its values, and for `Selected` their mask.
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
    """Start a copy to main memory, and return it. A copy from a GPU is complete only after a wait for the GPU's stream."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; return other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HostCopies:
    """Copies tensors to main memory on a stream of its own. From a CPU, `start` copies at once."""

    def __init__(self, device: torch.device, *, max_bytes: int = _MAX_IN_FLIGHT_BYTES) -> None:
        """Open a stream for copies from `device`, where at most `max_bytes` wait to be copied."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._max_bytes = max_bytes
        self._in_flight: deque[tuple[torch.cuda.Event, int]] = deque()
        """For each copy the event that follows it, and the bytes of its source, which are free after the event."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a copy: page-locked if there is a GPU, because it can copy to other memory only while it is idle."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def start(self, target: torch.Tensor, source: torch.Tensor, *, does_change: bool) -> None:
        """Start to copy `source`, once the current stream has computed it, into `target`, which `empty` made.

        Args:
            does_change: later computation changes `source`, so it must wait for the copy.
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
        """Add a copy to those in flight, and wait for the oldest ones while they exceed the limit. One copy is always allowed."""
        self._in_flight.append((copied, num_bytes))
        while len(self._in_flight) > 1 and sum(size for _, size in self._in_flight) > self._max_bytes:
            self._in_flight.popleft()[0].synchronize()

    def wait(self) -> None:
        """Return once every copy that was started has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
