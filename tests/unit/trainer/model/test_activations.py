"""Test off-loading of activations with copies that the test makes: what is moved, when computing waits, what is fetched
ahead."""

from dataclasses import dataclass, field

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trivet.trainer.model.activations import ActivationOffload, CudaTransfers


@dataclass
class FakeCopy:
    tensor: torch.Tensor
    name: str
    log: list[str]
    source: torch.Tensor

    def join(self) -> None:
        self.tensor.copy_(self.source)
        self.log.append(f"joined {self.name}")


@dataclass
class FakeTransfers:
    """Transfers that copy nothing before they are joined, as on a busy GPU."""

    log: list[str] = field(default_factory=list)
    copies: int = 0
    numbers: dict[int, int] = field(default_factory=dict)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.numbers

    def copy_to_host(self, tensor: torch.Tensor) -> FakeCopy:
        return self._start("leave", tensor, number=self.copies)

    def copy_to_device(self, tensor: torch.Tensor) -> FakeCopy:
        return self._start("back", tensor, number=self.numbers[tensor.data_ptr()])

    def _start(self, way: str, tensor: torch.Tensor, *, number: int) -> FakeCopy:
        target = torch.full_like(tensor, torch.nan)
        if way == "leave":
            self.copies += 1
            self.numbers[target.data_ptr()] = number
        self.log.append(f"{way} {number}")
        return FakeCopy(tensor=target, name=f"{way} {number}", log=self.log, source=tensor)


def chain(offload: ActivationOffload | None, *, seed: int = 0) -> list[torch.Tensor]:
    """Return the gradients of four checkpointed layers."""
    torch.manual_seed(seed)
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    hidden = torch.randn(4, 8)
    for layer in layers:

        def run(x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            out = checkpoint(lambda y: torch.tanh(layer(y)), x, use_reentrant=False)
            assert isinstance(out, torch.Tensor)
            return out

        hidden = (offload.wrap_block(run) if offload else run)(hidden)
    hidden.sum().backward()
    return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("max_inflight", [1, 2, 10])
def test_gradients_are_the_same_bytes(max_inflight: int) -> None:
    transfers = FakeTransfers()
    found = chain(ActivationOffload(transfers, max_inflight=max_inflight, min_bytes=1))
    assert transfers.copies == 4
    for gradient, expected in zip(found, chain(None), strict=True):
        assert torch.equal(gradient, expected)


def test_computing_waits_for_the_oldest_copy_when_too_many_are_under_way_and_what_is_next_comes_back_ahead() -> None:
    transfers = FakeTransfers()
    chain(ActivationOffload(transfers, max_inflight=2, min_bytes=1))
    assert transfers.log == [
        *("leave 0", "leave 1", "leave 2", "joined leave 0", "leave 3", "joined leave 1"),
        # The last two were never moved. While the third is recomputed, the second is on its way.
        *("joined leave 3", "back 1", "joined leave 2", "back 0", "joined back 1", "joined back 0"),
    ]


def test_small_tensors_stay() -> None:
    transfers = FakeTransfers()
    chain(ActivationOffload(transfers, max_inflight=2, min_bytes=4 * 8 * 4 + 1))
    assert transfers.log == []


def test_a_second_step_starts_anew_after_one_without_a_backward_pass() -> None:
    transfers = FakeTransfers()
    offload = ActivationOffload(transfers, max_inflight=1, min_bytes=1)
    offload.wrap_block(lambda x: x.sigmoid().square())(torch.randn(4, 8, requires_grad=True))
    for gradient, expected in zip(chain(offload), chain(None), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.gpu
def test_a_gpu_copies_while_it_computes() -> None:
    device = torch.device("cuda")
    offload = ActivationOffload(CudaTransfers(device, does_pin=True), max_inflight=2, min_bytes=1)
    torch.manual_seed(0)
    weights = [torch.randn(512, 512, device=device, requires_grad=True) for _ in range(6)]

    def gradients(around: bool) -> list[torch.Tensor]:
        hidden = torch.ones(2048, 512, device=device)
        for weight in weights:
            weight.grad = None

            def run(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
                out = checkpoint(lambda y: torch.tanh(y @ weight / 20), x, use_reentrant=False)
                assert isinstance(out, torch.Tensor)
                return out

            hidden = (offload.wrap_block(run) if around else run)(hidden)
        hidden.sum().backward()
        return [weight.grad.clone() for weight in weights if weight.grad is not None]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(found, expected)
