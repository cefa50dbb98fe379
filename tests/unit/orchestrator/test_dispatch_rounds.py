"""In a deterministic run the order in which groups end changes neither batches nor versions nor the sampler's state."""

import asyncio
import random
from collections import Counter

import pytest

from support.fake_servers import FakeServers
from support.groups import make_examples, make_sample
from support.virtual_time import run_virtually
from trivet.algorithms.advantages import mean_baseline
from trivet.config.schema.orchestrator import BufferConfig, OrchestratorConfig
from trivet.errors import WorkerLost
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.dispatcher import Dispatcher
from trivet.orchestrator.sampler import Draw, ExampleSampler, SamplerState
from trivet.wire.events import Dispatch, Event
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import PolicyVersion, Step

GROUPS = 3
STEPS = 6
LAG = 1
RULES = BufferConfig(easy_threshold=0.9, hard_threshold=0.1)


class Runs:
    """Groups whose reward follows from their id and whose duration is random. Some are lost up to three times, some always fail."""

    def __init__(self, timing: random.Random) -> None:
        self._timing = timing
        self._num_lost: Counter[int] = Counter()
        self.version = 0

    async def __call__(self, draw: Draw, base_url: str) -> list[Rollout]:
        await asyncio.sleep(self._timing.uniform(0.1, 30.0))
        if draw.group_id % 4 == 1 and self._num_lost[draw.group_id] < 3 and self._timing.random() < 0.7:
            self._num_lost[draw.group_id] += 1
            raise WorkerLost("its worker ended")
        if draw.group_id % 7 == 5:
            raise ValueError("this example is broken")
        rewards = (1.0, 1.0) if draw.group_id % 5 == 2 else (0.0, (draw.group_id % 3) / 2 + 0.5)
        return [
            Rollout(index=index, reward=reward, samples=[make_sample(version=self.version)])
            for index, reward in enumerate(rewards)
        ]


async def play(timing: random.Random, *, from_step: int = 0, state: SamplerState | None = None) -> tuple[dict, dict]:
    """Return the batches from `from_step` on, the version of each of their groups, and the sampler's state after each."""
    events: list[Event] = []
    runs, changed = Runs(timing), asyncio.Event()
    buffer = GroupBuffer(write_event=events.append, online_difficulty_filtering=True, max_off_policy_steps=8)
    sampler = ExampleSampler(make_examples(toy=20), seed=3, rules=RULES, state=state)
    dispatcher = Dispatcher(
        OrchestratorConfig(
            batch_size=2 * GROUPS,
            rollouts_per_example=2,
            max_concurrent=timing.choice([2, 4, 2 * GROUPS]),
            max_async_level=LAG,
            seq_len=64,
            deterministic=True,
        ),
        sampler=sampler,
        buffer=buffer,
        run_group=runs,
        servers=FakeServers(),  # type: ignore[arg-type]  stand in for ServerPool
        advantage=mean_baseline,
        on_group_end=changed.set,
        clock=asyncio.get_running_loop().time,
    )
    dispatcher.step = Step(from_step + 1)
    running = asyncio.create_task(dispatcher.run())
    batches, states = {}, {}
    for step in range(from_step + 1, STEPS + 1):
        dispatcher.step = Step(step)
        await asyncio.sleep(timing.uniform(0.0, 5.0))  # the policy comes later than the step begins
        runs.version = max(step - 1 - LAG, 0)
        dispatcher.version = PolicyVersion(runs.version)
        dispatcher.changed.notify()
        while (groups := buffer.take_batch(Step(step), num_groups=GROUPS)) is None:
            changed.clear()
            await changed.wait()
        assert buffer.num_in_flight == buffer.num_ready == len(dispatcher.undispatched_draws) == 0
        batches[step] = [(group.group_id, group.example_id, group.oldest_version) for group in groups]
        states[step] = sampler.snapshot()
    running.cancel()
    assert {event.version for event in events if isinstance(event, Dispatch)} <= {0, 1, 2, 3, 4}
    return batches, states


@pytest.fixture(scope="module")
def unbroken() -> tuple[dict, dict]:
    return run_virtually(play(random.Random(1000)), limit_s=100_000)


@pytest.mark.parametrize("seed", range(12))
def test_batches_do_not_depend_on_what_ends_first_nor_on_a_resume(seed: int, unbroken: tuple[dict, dict]) -> None:
    expected, states = unbroken
    assert all(version == max(step - 1 - LAG, 0) for step, batch in expected.items() for _, _, version in batch)
    timing = random.Random(seed)
    assert run_virtually(play(timing), limit_s=100_000) == (expected, states)
    from_step = 1 + seed % (STEPS - 1)
    resumed, _ = run_virtually(play(timing, from_step=from_step, state=states[from_step]), limit_s=100_000)
    assert resumed == {step: batch for step, batch in expected.items() if step > from_step}
