"""GPUs that are visible, and how many ranks they make."""

import pytest

from trivet.errors import ConfigError
from trivet.launcher.machine import Machine, visible_gpus
from trivet.launcher.ranks import count_ranks


@pytest.mark.parametrize(
    ("visible", "num_installed", "expected"),
    [
        (None, 2, ("0", "1")),
        (None, 0, ()),
        ("", 2, ()),
        ("-1", 2, ()),
        ("1", 2, ("1",)),
        ("3, 1", 4, ("3", "1")),
        ("0,9,1", 2, ("0",)),
        ("GPU-8f3e,MIG-1", 1, ("GPU-8f3e", "MIG-1")),
        ("0", 0, ()),
    ],
)
def test_the_variable_of_cuda_limits_and_orders_the_gpus(
    visible: str | None, num_installed: int, expected: tuple[str, ...]
) -> None:
    assert visible_gpus(visible, installed=lambda: num_installed) == expected


def test_ranks_are_one_per_gpu_or_one() -> None:
    two_gpus, laptop = Machine(gpus=("0", "1"), num_cpus=8), Machine(gpus=(), num_cpus=2)
    assert count_ranks(two_gpus, device="auto", num_ranks=None) == 2
    assert count_ranks(two_gpus, device="cpu", num_ranks=None) == 1
    assert count_ranks(laptop, device="auto", num_ranks=None) == 1
    assert count_ranks(laptop, device="auto", num_ranks=2) == 2


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_ranks \(3\) must be at most the 2 GPU"):
        count_ranks(Machine(gpus=("0", "1"), num_cpus=8), device="cuda", num_ranks=3)


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="shows no GPU"):
        count_ranks(Machine(gpus=(), num_cpus=2), device="cuda", num_ranks=None)
