"""Checks the limit of rollouts in flight with a model of engines: KV blocks, preemption, a queue, lengths with a heavy tail.

The model follows vLLM's scheduler. A step computes one block of tokens for each running sequence. A sequence that needs a block
when none is free preempts the one admitted last, which loses its blocks and is computed again from the front of the queue.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from trivet.client.server_load import ServerLoad
from trivet.config.schema.inference import ConcurrencyConfig
from trivet.orchestrator.dispatcher import ChangeEvent
from trivet.orchestrator.load_watcher import LoadWatcher

PROMPT_BLOCKS = 8
DURATION_S = 2400.0
WARM_UP_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The limits and speeds of an engine. Times are seconds."""

    num_blocks: int
    max_num_seqs: int
    step_s: float
    """Time of a step, however few sequences it has: the weights are read once."""
    block_s: float
    """Further time for each sequence of the step, and for each block of a prompt that is computed, also again."""


@dataclass
class Rollout:
    left: int
    """Blocks of tokens that are still to be sampled."""
    blocks: int = PROMPT_BLOCKS
    is_computed: bool = False


@dataclass
class Engine:
    kind: Kind
    now: float = 0.0
    num_sampled: int = 0
    num_preemptions: int = 0
    running: list[Rollout] = field(default_factory=list)
    waiting: deque[Rollout] = field(default_factory=deque)
    capacity: float = math.inf

    @property
    def num_rollouts(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def num_free(self) -> int:
        return self.kind.num_blocks - sum(rollout.blocks for rollout in self.running)

    def step(self) -> None:
        free = self.num_free
        survivors = len(self.running)
        needed = survivors
        while needed > free:  # each running sequence fills a block in this step
            free += self.running[survivors - 1].blocks
            survivors -= 1
            needed = survivors
        for rollout in reversed(self.running[survivors:]):
            rollout.is_computed = False
            self.waiting.appendleft(rollout)
            self.num_preemptions += 1
        was_preempted = survivors < len(self.running)
        del self.running[survivors:]
        free -= survivors
        while not was_preempted and self.waiting and len(self.running) < self.kind.max_num_seqs:
            if self.waiting[0].blocks + 1 > free:
                break
            free -= self.waiting[0].blocks + 1
            self.running.append(self.waiting.popleft())
        work = 0
        for rollout in self.running:
            work += 1 if rollout.is_computed else 1 + rollout.blocks
            rollout.is_computed = True
            rollout.blocks += 1
            rollout.left -= 1
        self.num_sampled += len(self.running)
        self.now += self.kind.step_s + self.kind.block_s * work
        self.running = [rollout for rollout in self.running if rollout.left > 0]

    def load(self) -> ServerLoad:
        return ServerLoad(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preemptions=self.num_preemptions,
            kv_usage=1 - self.num_free / self.kind.num_blocks,
        )


class World:
    """Starts rollouts on engines, as many at a time as `max_in_flight` allows. It stands in for servers and dispatcher."""

    def __init__(self, kinds: Sequence[Kind], *, max_in_flight: int, highest: int) -> None:
        self.engines = [Engine(kind) for kind in kinds]
        self.max_in_flight = max_in_flight
        self.highest_in_flight = highest
        self.changed = ChangeEvent()
        self.random = random.Random(1)
        self.now = 0.0
        self.at_warm: tuple[int, int] | None = None

    @property
    def rollouts_in_flight(self) -> int:
        return sum(engine.num_rollouts for engine in self.engines)

    async def server_loads(self, *, does_limit: bool = False) -> list[ServerLoad]:
        loads = [engine.load() for engine in self.engines]
        for engine, load in zip(self.engines, loads, strict=True):
            is_full = does_limit and not load.has_capacity
            engine.capacity = engine.num_rollouts - load.num_waiting if is_full else math.inf
        return loads

    def pick(self) -> Engine:
        return min(self.engines, key=lambda engine: (engine.num_rollouts >= engine.capacity, engine.num_rollouts))

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while (engine := min(self.engines, key=lambda engine: engine.now)).now < end:
            while self.rollouts_in_flight < self.max_in_flight:
                num_blocks = min(256, max(1, round(self.random.lognormvariate(3.0, 1.0))))
                self.pick().waiting.append(Rollout(left=num_blocks))
            engine.step()
        self.now = end
        if self.at_warm is None and end >= WARM_UP_S:
            self.at_warm = self.totals()
        if end >= DURATION_S:
            raise asyncio.CancelledError

    def totals(self) -> tuple[int, int]:
        return sum(engine.num_sampled for engine in self.engines), sum(engine.num_preemptions for engine in self.engines)

    def measure(self, config: ConcurrencyConfig) -> tuple[float, int]:
        """Return the blocks that are sampled in a second after the warm-up, and the preemptions in that time."""

        async def run() -> None:
            watcher = LoadWatcher(config, servers=self, dispatcher=self, sleep=self.sleep)  # type: ignore[arg-type]  # acts as both
            with suppress(asyncio.CancelledError):
                await watcher.run()

        asyncio.run(run())
        assert self.at_warm is not None
        sampled, preempted = (end - warm for end, warm in zip(self.totals(), self.at_warm, strict=True))
        return sampled / (DURATION_S - WARM_UP_S), preempted


START = 128
HIGHEST = 1024
LARGE = Kind(num_blocks=40_000, max_num_seqs=1024, step_s=0.4, block_s=0.0005)
FEW_SEQUENCES = Kind(num_blocks=40_000, max_num_seqs=64, step_s=0.2, block_s=0.004)
SMALL_CACHE = Kind(num_blocks=1_500, max_num_seqs=256, step_s=0.3, block_s=0.004)
CPU = Kind(num_blocks=600, max_num_seqs=256, step_s=0.05, block_s=0.02)
WORLDS = {
    "large": [LARGE],
    "few sequences": [FEW_SEQUENCES],
    "small cache": [SMALL_CACHE],
    "cpu": [CPU],
    "four of two kinds": [SMALL_CACHE, SMALL_CACHE, FEW_SEQUENCES, LARGE],
}


@pytest.mark.parametrize("name", WORLDS)
def test_from_one_start_every_engine_gets_nearly_the_throughput_of_its_best_fixed_number(name: str) -> None:
    fixed = {
        number: World(WORLDS[name], max_in_flight=number, highest=number).measure(ConcurrencyConfig(adaptive=False))
        for number in (8, 32, 128, HIGHEST)
    }
    best = max(fixed, key=lambda number: fixed[number][0])
    throughput, preemptions = World(WORLDS[name], max_in_flight=START, highest=HIGHEST).measure(ConcurrencyConfig())
    assert throughput >= 0.93 * fixed[best][0]
    assert preemptions <= 0.4 * fixed[HIGHEST][1] or throughput >= 1.3 * fixed[best][0]


def test_off_by_its_key_the_limit_stays_and_rollouts_are_spread_evenly() -> None:
    world = World(WORLDS["four of two kinds"], max_in_flight=START, highest=HIGHEST)
    world.measure(ConcurrencyConfig(adaptive=False))
    assert world.max_in_flight == START
    assert {engine.capacity for engine in world.engines} == {math.inf}
