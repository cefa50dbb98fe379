"""Keeps an optimizer's state in main memory and moves it to the GPU for the update, some parameters at a time.

Called by `trainer.open_session` for model.optim_cpu_offload. Works with any optimizer that skips parameters without a gradient.
Torch's CPUOffloadPolicy (model.fsdp_cpu_offload) is no substitute: it moves the parameters too, and updates them on the CPU.
The code for GPUs has not run on one yet.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trivet.trainer.device_copies import copy_to_host, local_part

logger = logging.getLogger(__name__)

_PART_BYTES = 256 << 20
"""Bytes of parameters in one part. The state of at most three parts is on the GPU at one time."""

State = dict[str, Any]
"""The optimizer's state of one parameter, by name."""


class StateMover:
    """Moves the state of some parameters, a part of all, between main memory and the device. On a CPU it moves nothing.

    Args of all methods: the index of the part, and the state of each of its parameters.
    """

    def fetch(self, part: int, states: Sequence[State]) -> None:
        """Begin to move `states` to the device."""

    def await_fetched(self, part: int) -> None:
        """Let the next update wait for the move that `fetch` began."""

    def give_back(self, part: int, states: Sequence[State]) -> None:
        """Begin to move `states` to main memory, after the updates that were begun before."""

    def await_given_back(self, part: int) -> None:
        """Return once the state of the part is in main memory."""


def keep_state_on_host(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    part_bytes: int = _PART_BYTES,
    mover: StateMover | None = None,
) -> None:
    """Replace `optimizer.step` and `optimizer.load_state_dict` by functions that keep the state on the host between updates.

    While one part is updated, the state of the next part is fetched, and that of the previous part is given back. On the CPU the
    update is made in parts too, and nothing moves.
    """
    if device.type != "cuda":
        logger.info("model.optim_cpu_offload does nothing here: the optimizer's state is in main memory already")
    state_mover = mover or (CudaStateMover(device) if device.type == "cuda" else StateMover())
    update, load = optimizer.step, optimizer.load_state_dict

    def step(closure: None = None) -> None:
        assert closure is None, "an update in parts cannot compute its loss again"
        _update_in_parts(optimizer, update, state_mover, part_bytes=part_bytes)

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        """Load `state_dict` and leave moments on the host: `load` would move all of them to the device of the parameters."""
        step_counts = {
            key: {name: value for name, value in state.items() if not _is_moved(value)}
            for key, state in state_dict["state"].items()
        }
        load({**state_dict, "state": step_counts})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if _is_moved(value):
                    optimizer.state[parameter][name] = copy_to_host(value) if value.device.type == "cuda" else value

    optimizer.step = step  # type: ignore[method-assign]  checkpoints call it too, to make the state
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _update_in_parts(
    optimizer: torch.optim.Optimizer, update: Callable[[], object], mover: StateMover, *, part_bytes: int
) -> None:
    """Call `update` for one part after the other, while the state of its neighbours moves."""
    pairs = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    parts = list(_divide_into_parts(pairs, max_bytes=part_bytes))
    states = [[optimizer.state[parameter] for parameter, _ in part] for part in parts]
    for parameter, _ in pairs:
        parameter.grad = None
    for index, part in enumerate(parts):
        for following in range(index + 1 if index else 0, min(index + 2, len(parts))):
            mover.fetch(following, states[following])
        mover.await_fetched(index)
        for parameter, gradient in part:
            parameter.grad = gradient
        update()
        for parameter, _ in part:
            parameter.grad = None
        mover.give_back(index, states[index])
        if index:
            mover.await_given_back(index - 1)  # else the host would fetch all parts before the GPU has updated one
    if parts:
        mover.await_given_back(len(parts) - 1)
    for parameter, gradient in pairs:
        parameter.grad = gradient


class CudaStateMover(StateMover):
    """Moves state on a stream of its own while the GPU computes updates."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._fetched: dict[int, torch.cuda.Event] = {}
        self._given_back: dict[int, torch.cuda.Event] = {}

    def fetch(self, part: int, states: Sequence[State]) -> None:
        """See `StateMover`."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            for state in states:
                for name, value in state.items():
                    if _is_moved(value) and value.device.type == "cpu":
                        state[name] = value.to(self._device, non_blocking=True)
                        local_part(state[name]).record_stream(current)  # the update uses it on another stream
            self._fetched[part] = torch.cuda.Event()
            self._fetched[part].record(self._stream)

    def await_fetched(self, part: int) -> None:
        """See `StateMover`."""
        torch.cuda.current_stream(self._device).wait_event(self._fetched.pop(part))

    def give_back(self, part: int, states: Sequence[State]) -> None:
        """See `StateMover`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for state in states:
                for name, value in state.items():
                    if _is_moved(value) and value.device.type == "cuda":
                        # The first update has allocated the state on another stream.
                        local_part(value).record_stream(self._stream)
                        state[name] = copy_to_host(value)
            self._given_back[part] = torch.cuda.Event()
            self._given_back[part].record(self._stream)

    def await_given_back(self, part: int) -> None:
        """See `StateMover`."""
        self._given_back.pop(part).synchronize()


def _divide_into_parts(
    pairs: list[tuple[torch.nn.Parameter, Any]], *, max_bytes: int
) -> Iterator[list[tuple[torch.nn.Parameter, Any]]]:
    """Divide parameters and their gradients into parts of at most `max_bytes`; a larger parameter is a part alone."""
    part: list[tuple[torch.nn.Parameter, Any]] = []
    num_bytes = 0
    for parameter, gradient in pairs:
        # Not the bytes of this rank's shard: parts must be the same on every rank, because an update may be collective.
        size = parameter.numel() * parameter.element_size()
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            size //= prod(num_shards for num_shards, placement in sizes if not placement.is_replicate())
        if part and num_bytes + size > max_bytes:
            yield part
            part, num_bytes = [], 0
        part.append((parameter, gradient))
        num_bytes += size
    if part:
        yield part


def _is_moved(value: object) -> bool:
    """Return True for a tensor of moments, and False for a count of steps, which stays where the optimizer made it."""
    return isinstance(value, torch.Tensor) and value.numel() > 1
