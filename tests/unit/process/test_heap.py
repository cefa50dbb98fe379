"""The heap is trimmed when it has grown, and not for batches that need more now and then."""

import os
import subprocess
import sys
from collections.abc import Iterable

from trivet.process.heap import Heap, resident_bytes


def trims(sizes: Iterable[int]) -> list[int]:
    """Return the places in `sizes`, the memory after each step, after which the heap was trimmed."""
    taken: list[int] = []
    now = 0
    heap = Heap(read_bytes=lambda: size, trim=lambda: taken.append(now))
    for now, size in enumerate(sizes):  # noqa: B007  both are read by the heap's functions
        heap.trim_if_grown()
    return taken


def test_memory_that_grows_from_step_to_step_is_given_back() -> None:
    until_trimmed = [1000 + 10 * step for step in range(32)]  # a quarter above the largest of the first five is 1,300
    assert trims([*until_trimmed, *until_trimmed]) == [31, 63]


def test_memory_that_stays_is_kept() -> None:
    assert trims([1000, 1200, 1100, 1000, 1200] * 30) == []


def test_batches_that_need_more_cost_a_trim_every_twenty_steps_at_most() -> None:
    places = trims([1000] * 10 + [3000] * 90)
    assert places == [19, 39, 59, 79, 99]


def test_memory_that_grows_before_it_is_measured_again_does_not_raise_the_limit() -> None:
    assert trims([1000] * 20 + [1300] + [1280] * 19 + [1260]) == [20, 40]


def test_free_memory_goes_back_although_glibc_was_told_to_keep_it() -> None:
    program = (
        "import ctypes; from trivet.process.heap import resident_bytes, trim_heap\n"
        "kept = [bytearray(4096 * 25) for _ in range(4000)]\n"
        "del kept[::2]; before = resident_bytes(); trim_heap(); print(before - resident_bytes())"
    )
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "34359738368", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | settings, check=True, capture_output=True, text=True
    )
    assert int(done.stdout) > 150 * 2**20, "2,000 buffers of 100 KiB between others"


def test_the_memory_of_this_process_is_read() -> None:
    assert 2**20 < resident_bytes() < 2**40
