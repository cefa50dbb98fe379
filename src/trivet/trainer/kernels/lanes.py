"""Computes rows side by side on a CPU: each lane is a thread that computes whole rows with its share of the cores.

Used by `trainer.step`. The threads of one operator wait for each other thousands of times in a step, and a wait often takes longer
than the operator itself. Rows share only the sum of their gradients, added under a lock of each parameter. The order of these
additions is not fixed, so deterministic runs have one lane.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

_ROW_TOKENS = 1024
"""Least tokens of a lane's row: each row adds its gradients to all parameters once, however few tokens it has."""

LaneRow = TypeVar("LaneRow")
Result = TypeVar("Result")


class Lanes:
    """A number of lanes. One lane computes rows one after the other in the caller's thread."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    @classmethod
    def of(cls, *, seq_len: int) -> "Lanes":
        """Return as many lanes as rows of `seq_len` tokens can feed, at most one a torch thread; one in a deterministic run."""
        if torch.are_deterministic_algorithms_enabled():
            return cls()
        return cls(max(1, min(torch.get_num_threads(), seq_len // _ROW_TOKENS)))

    def max_tokens(self, longest: int) -> int:
        """Return the most tokens that a lane's row may have: all lanes together then take the memory of one row of `longest`."""
        return -(-longest // self.count)

    def map(self, function: Callable[[LaneRow], Result], rows: Sequence[LaneRow]) -> list[Result]:
        """Return the results in the order of `rows`; raise what the first row that failed raised."""
        if self.count == 1 or len(rows) < 2:  # a single row is computed with all cores
            return [function(row) for row in rows]
        return list(_threads(self.count, torch.get_num_threads()).map(function, rows))


@cache
def _threads(count: int, whole: int) -> ThreadPoolExecutor:
    """Return the threads, which share `whole` torch threads and live as long as the process."""
    have_started = threading.Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread's first call to torch gives it the number that all share
        torch.set_num_threads(max(1, whole // count))
        have_started.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="lane", initializer=start)
    for _ in range(count):
        pool.submit(int)
    have_started.wait()
    torch.set_num_threads(whole)  # later threads would otherwise get the number of a lane
    return pool
