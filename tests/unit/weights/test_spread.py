"""How a policy spreads over many readers, in virtual time, with the choices of the real readers."""

import asyncio
import math
import random
from collections import Counter

import pytest

from support.virtual_time import run_virtually
from trivet.weights.serve import MAX_TRANSFERS
from trivet.weights.sources import Problem, SourceChoice, SourceProblem

COPY_S = 20.0
"""Seconds in which one link carries the policy."""
REQUEST_S = 0.002


class Network:
    """Readers that fetch one policy of one file, and then serve it. Each link carries `MAX_TRANSFERS` transfers at one rate."""

    def __init__(self, num_readers: int, *, seed: int) -> None:
        self.names = ["origin", *(f"reader-{index}" for index in range(num_readers))]
        self.has_policy = {"origin"}
        self.num_transfers: Counter[str] = Counter()
        self.num_requests = 0
        self.ended_at: list[float] = []
        self._seed = seed

    async def read(self, name: str) -> None:
        choice = SourceChoice([other for other in self.names if other != name], rng=random.Random(f"{self._seed} {name}"))
        while name not in self.has_policy:
            source = choice.next()
            if source is None:
                await asyncio.sleep(choice.pause_s)
                continue
            self.num_requests += 1
            await asyncio.sleep(REQUEST_S)
            if source not in self.has_policy:
                choice.fail(source, SourceProblem(Problem.ABSENT))
            elif self.num_transfers[source] == MAX_TRANSFERS:
                choice.fail(source, SourceProblem(Problem.BUSY))
            else:
                self.num_transfers[source] += 1
                await asyncio.sleep(COPY_S * MAX_TRANSFERS)
                self.num_transfers[source] -= 1
                self.has_policy.add(name)
        self.ended_at.append(asyncio.get_running_loop().time())


def spread(num_readers: int, *, seed: int = 0) -> Network:
    network = Network(num_readers, seed=seed)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in network.names[1:]:
                tasks.create_task(network.read(name))

    run_virtually(scenario(), limit_s=10_000)
    return network


@pytest.mark.parametrize("seed", range(3))
def test_the_time_grows_with_the_logarithm_of_the_number_of_readers(seed: int) -> None:
    for num_readers in (1, 2, 8, 26, 100):
        network = spread(num_readers, seed=seed)
        rounds = math.ceil(math.log(num_readers + 1, MAX_TRANSFERS + 1) - 1e-9)  # the sources multiply by 1 + MAX_TRANSFERS
        seconds = max(network.ended_at)
        assert len(network.ended_at) == num_readers
        assert rounds * MAX_TRANSFERS * COPY_S <= seconds <= 1.25 * (rounds * MAX_TRANSFERS * COPY_S) + 5.0, num_readers
    assert seconds < 100 * COPY_S / 8, "the origin alone would send it a hundred times"


def test_a_hundred_readers_send_few_requests_and_end_within_the_time_that_a_pool_allows() -> None:
    network = spread(100)
    seconds = max(network.ended_at)
    assert network.num_requests / 100 / seconds < 10, "requests per reader and second"
    half = sorted(network.ended_at)[49]
    assert seconds <= 2 * half, "ServerPool waits for the second half as long as the first took"


def test_a_source_with_wrong_bytes_is_never_asked_again() -> None:
    choice = SourceChoice(["origin", "bad", "good"], rng=random.Random(0))
    asked: list[str] = []
    while len(asked) < 30:
        if (source := choice.next()) is not None:
            asked.append(source)
            choice.fail(source, SourceProblem(Problem.WRONG if source == "bad" else Problem.BUSY))
    assert asked.count("bad") == 1
    assert set(asked) == {"origin", "bad", "good"}
