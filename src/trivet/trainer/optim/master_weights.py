"""Casts master weights to the dtype of computation and sums their gradients, on a CPU that one process alone trains on.

Used by `trainer.kernels.cpu` and the head. Where weights are sharded, FSDP does both.
"""

import threading
from collections import defaultdict
from dataclasses import dataclass

import torch

_TILE_NUMBERS = 1 << 18
"""Numbers of a gradient that are widened and added at one time: so many stay in the cache of a core."""


class MasterWeights:
    """The narrow copies of the weights. Several threads may use it."""

    def __init__(self) -> None:
        self.sums_gradients = False
        """Gradients are added here, not by autograd, which would first make a wide copy of each row's gradient."""
        self._casts: dict[torch.Tensor, _Cast] = {}
        self._lock = threading.Lock()
        self._locks: defaultdict[torch.Tensor, threading.Lock] = defaultdict(threading.Lock)

    def of(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `weight` in `dtype`, without gradient. It is cast once an update; `weight` itself if it has the dtype."""
        if weight.dtype == dtype:
            return weight.detach()
        with self._lock:
            found = self._casts.get(weight)
            if found is None or found.values.dtype != dtype:
                found = self._casts[weight] = _Cast(weight.detach().to(dtype), weight._version)
            return found.follow(weight)

    def renew(self) -> None:
        """Cast anew the weights that changed: all cores do it faster than the first thread that asks."""
        for weight, cast in self._casts.items():
            cast.follow(weight)

    def add_gradient(self, weight: torch.Tensor, part: torch.Tensor) -> None:
        """Add a part of the gradient of `weight`, in its shape and any dtype; only where gradients are summed here."""
        assert self.sums_gradients
        with self._lock_of(weight):
            if weight.grad is None:
                weight.grad = torch.empty_like(weight).copy_(part)
            else:
                _add(weight.grad, part)

    def add_to_rows(self, weight: torch.Tensor, indices_N: torch.Tensor, part_NH: torch.Tensor) -> torch.Tensor | None:
        """Add a part of the gradient of `weight[indices]`; a row may occur several times.

        Returns:
            The gradient that the backward pass returns to autograd; None where gradients are summed here.
        """
        part_NH = part_NH.to(weight.dtype)
        if not self.sums_gradients:
            return torch.zeros_like(weight).index_add_(0, indices_N, part_NH)
        with self._lock_of(weight):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.index_add_(0, indices_N, part_NH)
        return None

    def _lock_of(self, weight: torch.Tensor) -> threading.Lock:
        with self._lock:
            return self._locks[weight]


@dataclass(slots=True)
class _Cast:
    values: torch.Tensor
    version: int
    """The weight's version at the time of the cast."""

    def follow(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the values, cast again if the weight has changed."""
        if self.version != weight._version:
            self.values.copy_(weight.detach())
            self.version = weight._version
        return self.values


def _add(total: torch.Tensor, part: torch.Tensor) -> None:
    if part.dtype == total.dtype:
        total.add_(part)
        return
    size = max(1, _TILE_NUMBERS // part[0].numel())
    for wide, narrow in zip(total.split(size), part.split(size), strict=True):
        wide.add_(narrow)
