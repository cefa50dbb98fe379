"""Keeps activations in main memory, instead of on the GPU, until the backward pass needs them. Called by `trainer.model.blocks`.

Copies run on streams of their own while the GPU computes. Forward: at most `max_inflight` copies run at one time; one more waits
for the oldest. Backward: while a block is computed again, the activations of the block before it are copied back.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_MIN_BYTES = 1 << 20
"""Tensors of fewer bytes cost more to move than to keep."""


@dataclass(slots=True, weakref_slot=True)
class _Kept:
    """An activation that autograd has saved, and its copies."""

    to_host: "CudaCopy"
    on_device: torch.Tensor | None
    """The tensor on the GPU; None once it is copied."""
    previous: "weakref.ref[_Kept] | None"
    """The activation that was saved before this one. The backward pass needs it after this one."""
    to_device: "CudaCopy | None" = None
    """The copy back, once it was started."""


class ActivationOffload:
    """Moves what autograd saves in a block to main memory and back."""

    def __init__(self, transfers: "CudaTransfers", *, max_inflight: int, min_bytes: int = _MIN_BYTES) -> None:
        self._transfers = transfers
        self._max_inflight = max_inflight
        self._min_bytes = min_bytes
        self._inflight: deque[_Kept] = deque()
        self._last: weakref.ref[_Kept] | None = None

    def wrap_block(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward`, so that tensors that autograd saves in it are kept in main memory."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(self._pack, self._unpack):
                return forward(*args, **kwargs)

        return run

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_weight = isinstance(tensor, torch.nn.Parameter)
        if is_weight or tensor.nbytes < self._min_bytes or self._transfers.is_on_host(tensor):
            return tensor
        kept = _Kept(to_host=self._transfers.copy_to_host(tensor.detach()), on_device=tensor.detach(), previous=self._last)
        self._last = weakref.ref(kept)
        self._inflight.append(kept)
        while len(self._inflight) > self._max_inflight:
            oldest = self._inflight.popleft()
            oldest.to_host.join()  # later computation may reuse the tensor's memory, so it must wait for the copy
            oldest.on_device = None
        return kept

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Kept):
            return packed
        # The backward pass has begun: tensors that are still on the GPU stay there.
        self._inflight.clear()
        before = packed.previous() if packed.previous is not None else None
        if before is not None and before.on_device is None and before.to_device is None:
            before.to_device = self._transfers.copy_to_device(before.to_host.tensor)
        if packed.on_device is not None:
            packed.to_host.join()
            return packed.on_device
        to_device = packed.to_device or self._transfers.copy_to_device(packed.to_host.tensor)
        packed.to_device = None
        to_device.join()
        return to_device.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCopy:
    """A copy that was started."""

    tensor: torch.Tensor
    """The destination; it is whole once `join` was called."""
    done: torch.cuda.Event

    def join(self) -> None:
        """Let later computation on the current stream wait for the copy."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self.done)
        if self.tensor.is_cuda:
            # It was allocated for the copying stream, which must not free it while computing uses it.
            self.tensor.record_stream(stream)


class CudaTransfers:
    """Copies on two streams, one for each direction."""

    def __init__(self, device: torch.device, *, does_pin: bool) -> None:
        """Open the streams. With `does_pin` copies go to page-locked memory. Copies to other memory make the host wait."""
        self._device = device
        self._does_pin = does_pin
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in main memory."""
        return not tensor.is_cuda

    def copy_to_host(self, tensor: torch.Tensor) -> "CudaCopy":
        """Start to copy `tensor` to main memory, once the current stream has computed it."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._does_pin)
        return self._copy(tensor, host, self._to_host)

    def copy_to_device(self, tensor: torch.Tensor) -> "CudaCopy":
        """Start to copy `tensor` back, once it has arrived in main memory."""
        with torch.cuda.stream(self._to_device):
            target = torch.empty_like(tensor, device=self._device, pin_memory=False)
        return self._copy(tensor, target, self._to_device)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream) -> "CudaCopy":
        if stream is self._to_host:
            stream.wait_stream(torch.cuda.current_stream())
        else:
            stream.wait_stream(self._to_host)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=self._does_pin)
            done = torch.cuda.Event()
            done.record(stream)
        return CudaCopy(tensor=target, done=done)
