"""How a policy spreads over many readers, in virtual time, with the choices of the real readers."""

import asyncio
import itertools
import math
import random
from collections import Counter

import pytest

from support.virtual_time import run_virtually
from trivet.weights.fetch import draw_pause_s, draw_round
from trivet.weights.serve import MAX_TRANSFERS

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
        sources, rng = [other for other in self.names if other != name], random.Random(f"{self._seed} {name}")
        for num_rounds in itertools.count(1):
            for source in draw_round(sources, rng):
                self.num_requests += 1
                await asyncio.sleep(REQUEST_S)
                if source in self.has_policy and self.num_transfers[source] < MAX_TRANSFERS:
                    self.num_transfers[source] += 1
                    await asyncio.sleep(COPY_S * MAX_TRANSFERS)
                    self.num_transfers[source] -= 1
                    self.has_policy.add(name)
                    break
            if name in self.has_policy:
                break
            await asyncio.sleep(draw_pause_s(num_rounds, rng))
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


@pytest.mark.parametrize("num_sources", [0, 1, 2, 8, 9, 100])
def test_a_round_asks_the_origin_and_a_few_others_once(num_sources: int) -> None:
    sources, rng = [f"source-{index}" for index in range(num_sources)], random.Random(0)
    rounds = [draw_round(sources, rng) for _ in range(1000)]
    for drawn in rounds:
        assert len(drawn) == len(set(drawn)) == min(num_sources, 8)
        assert sources[:1] == [source for source in drawn if source == "source-0"]
    assert {source for drawn in rounds for source in drawn} == set(sources)
