"""Keeps an optimizer's state in main memory and moves it to the GPU for the update, some parameters at a time.

Called by `trainer.open_session` for model.optim_cpu_offload. Works with any optimizer that skips parameters without a gradient.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

_PART_BYTES = 512 << 20
"""Bytes of parameters whose state is on the GPU at one time."""


def keep_state_on_host(optimizer: torch.optim.Optimizer, device: torch.device, *, part_bytes: int = _PART_BYTES) -> None:
    """Make `optimizer.step()` fetch the state it needs and put it back.

    Args:
        device: the device of the parameters; on the CPU the update is made in parts, and nothing moves.
    """
    if device.type != "cuda":
        logger.info("model.optim_cpu_offload does nothing here: the optimizer's state is in main memory already")
    update = optimizer.step

    def step(closure: None = None) -> None:
        """Take one step by calling `update` for some parameters at a time."""
        assert closure is None, "an update in parts cannot compute its loss again"
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        for part in _parts(list(zip(trained, gradients, strict=True)), max_bytes=part_bytes):
            for parameter, gradient in part:
                parameter.grad = gradient
                _move(optimizer.state[parameter], device)
            update()
            for parameter, _ in part:
                parameter.grad = None
                _move(optimizer.state[parameter], torch.device("cpu"))
            if device.type == "cuda":
                # The memory that is being copied is freed next.
                torch.cuda.synchronize(device)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    optimizer.step = step  # type: ignore[method-assign]  checkpoints call it too, to make the state


def return_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the state back to main memory, after a checkpoint was loaded to where the parameters are."""
    for state in optimizer.state.values():
        _move(state, torch.device("cpu"))


Pair = tuple[torch.nn.Parameter, Any]


def _parts(pairs: list[Pair], *, max_bytes: int) -> Iterator[list[Pair]]:
    part: list[Pair] = []
    num_bytes = 0
    for parameter, gradient in pairs:
        # An even share, not this rank's: parts must be the same on every rank, because an update may be collective.
        size = parameter.numel() * parameter.element_size()
        if isinstance(parameter, DTensor):
            size //= parameter.device_mesh.size(-1)
        if part and num_bytes + size > max_bytes:
            yield part
            part, num_bytes = [], 0
        part.append((parameter, gradient))
        num_bytes += size
    if part:
        yield part


def _move(state: dict[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.device.type == device.type or value.numel() == 1:
            continue  # a count of steps stays where the optimizer made it
        if device.type == "cpu":
            host = torch.empty_like(value, device=device, pin_memory=True)
            state[name] = host.copy_(value, non_blocking=True)
        else:
            state[name] = value.to(device, non_blocking=True)
