"""An optimizer that updates some parameters at a time equals one that updates all at once."""

from collections.abc import Sequence

import pytest
import torch

from trivet.trainer.optim.host_state import State, keep_state_on_host

CPU = torch.device("cpu")


def train(make: type[torch.optim.Optimizer], *, part_bytes: int | None, **options: float) -> tuple[list[torch.Tensor], dict]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, size)) for size in (3, 5, 2)]
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = make([*parameters, unused], lr=0.1, **options)
    if part_bytes is not None:
        keep_state_on_host(optimizer, CPU, part_bytes=part_bytes)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = parameter.detach() * (step + 1)
        optimizer.step()
    assert all(parameter.grad is not None for parameter in parameters)
    assert unused.grad is None
    return [parameter.detach() for parameter in parameters], optimizer.state_dict()


@pytest.mark.parametrize("part_bytes", [1, 100, 10_000])
@pytest.mark.parametrize(("make", "options"), [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9})])
def test_an_update_in_parts_is_the_update(make: type[torch.optim.Optimizer], options: dict, part_bytes: int) -> None:
    found, state = train(make, part_bytes=part_bytes, **options)
    expected, expected_state = train(make, part_bytes=None, **options)
    for weight, other in zip(found, expected, strict=True):
        assert torch.equal(weight, other)
    assert state["state"].keys() == expected_state["state"].keys()
    for index, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(value, expected_state["state"][index][name])


class RecordingMover:
    """Writes down when it is asked for what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def fetch(self, part: int, states: Sequence[State]) -> None:
        self.calls.append(("fetch", part))

    def await_fetched(self, part: int) -> None:
        self.calls.append(("update", part))

    def give_back(self, part: int, states: Sequence[State]) -> None:
        self.calls.append(("give back", part))

    def await_given_back(self, part: int) -> None:
        self.calls.append(("await", part))


def test_state_moves_beside_the_update_of_another_part_and_at_most_three_parts_are_on_the_device() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(4)]
    optimizer, mover = torch.optim.SGD(parameters, lr=0.1), RecordingMover()
    keep_state_on_host(optimizer, CPU, part_bytes=1, mover=mover)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert mover.calls == [
        *(("fetch", 0), ("fetch", 1), ("update", 0), ("give back", 0)),
        *(("fetch", 2), ("update", 1), ("give back", 1), ("await", 0)),
        *(("fetch", 3), ("update", 2), ("give back", 2), ("await", 1)),
        *(("update", 3), ("give back", 3), ("await", 2), ("await", 3)),
    ]


def test_loaded_moments_stay_in_main_memory_and_counts_go_where_the_parameters_are() -> None:
    """The device "meta" stands for the GPU."""
    source = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4)) for _ in range(2)], fused=True)
    for parameter in source.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    source.step()
    target = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, device="meta")) for _ in range(2)], lr=0.5)
    keep_state_on_host(target, torch.device("meta"))
    saved = source.state_dict()
    target.load_state_dict(saved)
    assert target.param_groups[0]["lr"] == source.param_groups[0]["lr"]
    for state, expected in zip(target.state.values(), saved["state"].values(), strict=True):
        assert state["step"].device.type == "meta"
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].device == CPU
            assert torch.equal(state[name], expected[name])


@pytest.mark.gpu
def test_state_is_in_main_memory_between_updates() -> None:
    device = torch.device("cuda")
    parameters = [torch.nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    keep_state_on_host(optimizer, device, part_bytes=64 * 64 * 4)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert {moment.device.type for moment in moments} == {"cpu"}
        assert all(moment.is_pinned() for moment in moments)
