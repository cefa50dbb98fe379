import pytest
import torch

from trivet.trainer.device_copies import CopiesInFlight, HostCopies


class FakeEvent:
    """Writes its name down when it is waited for."""

    def __init__(self, name: int, waited: list[int]) -> None:
        self._name, self._waited = name, waited

    def synchronize(self) -> None:
        self._waited.append(self._name)


def test_the_oldest_copies_are_waited_for_while_too_many_bytes_are_on_the_device() -> None:
    waited: list[int] = []
    in_flight = CopiesInFlight(max_bytes=100)
    seen: list[list[int]] = []
    for name, num_bytes in enumerate([40, 40, 40, 60, 500, 1]):
        in_flight.add(FakeEvent(name, waited), num_bytes=num_bytes)
        seen.append(list(waited))
    assert seen == [[], [], [0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_on_the_cpu_a_copy_is_there_at_once_and_converted() -> None:
    copies = HostCopies(torch.device("cpu"))
    source = torch.arange(4.0)
    target = copies.empty(source.shape, torch.bfloat16)
    copies.start(target, source, does_change=True)
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not target.is_pinned()


@pytest.mark.gpu
def test_a_copy_is_not_overtaken_by_what_changes_its_source() -> None:
    device = torch.device("cuda")
    copies = HostCopies(device)
    source = torch.ones(1 << 24, device=device)
    target = copies.empty(source.shape, source.dtype)
    copies.start(target, source, does_change=True)
    source.zero_()
    copies.wait()
    assert target.is_pinned()
    assert bool((target == 1).all())
