"""The dispatcher against scripted histories: groups that finish, fail and go stale while policies load and batches form."""

import asyncio
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from support.groups import make_sample
from trivet.algorithms.advantages import mean_baseline
from trivet.algorithms.staleness import required_version
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.dispatcher import Dispatcher, Limits
from trivet.orchestrator.sampler import Draw, ExampleSampler
from trivet.wire.events import BatchFormed, Dispatch, Drop, Event, Filter, Finish
from trivet.wire.rollouts import GroupId, Rollout
from trivet.wire.versions import PolicyVersion, Step


class Script:
    """Groups that end when the test says so."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[list[Rollout]]] = {}

    async def __call__(self, draw: Draw) -> list[Rollout]:
        future = asyncio.get_running_loop().create_future()
        self.waiting[draw.group_id] = future
        try:
            return await future
        finally:
            self.waiting.pop(draw.group_id, None)

    def finish(self, group_id: int, *, version: int, rewards: tuple[float, float] = (0.0, 1.0)) -> None:
        rollouts = [Rollout(index=i, reward=reward, samples=[make_sample(version=version)]) for i, reward in enumerate(rewards)]
        self.waiting[group_id].set_result(rollouts)

    def fail(self, group_id: int) -> None:
        self.waiting[group_id].set_exception(RuntimeError("boom"))


def make_dispatcher(events: list[Event], script: Script, *, again=(), max_async_level=1, max_off_policy_steps=8):
    limits = Limits(
        rollouts_per_example=2, rollouts_per_step=8, max_rollouts_in_flight=8, max_async_level=max_async_level, seq_len=64
    )
    buffer = GroupBuffer(write_event=events.append, online_difficulty_filtering=True, max_off_policy_steps=max_off_policy_steps)
    sampler = ExampleSampler({"toy": 7}, seed=0, next_group_id=max(again, default=-1) + 1)
    return Dispatcher(
        sampler=sampler,
        buffer=buffer,
        run_group=script,
        advantage=mean_baseline,
        limits=limits,
        on_change=lambda: None,
        again=again,
    ), buffer


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def test_groups_in_flight_fill_the_limit_and_are_replaced():
    async def scenario() -> None:
        events: list[Event] = []
        script = Script()
        dispatcher, buffer = make_dispatcher(events, script)
        running = asyncio.create_task(dispatcher.run())
        await settle()
        assert sorted(script.waiting) == [0, 1, 2, 3]
        script.finish(2, version=0)
        await settle()
        assert sorted(script.waiting) == [0, 1, 3, 4]
        assert buffer.num_ready == 1
        running.cancel()

    asyncio.run(scenario())


def test_groups_of_the_checkpoint_start_first_under_their_old_ids():
    async def scenario() -> None:
        events: list[Event] = []
        script = Script()
        dispatcher, _ = make_dispatcher(events, script, again=[11, 14])
        running = asyncio.create_task(dispatcher.run())
        await settle()
        assert list(script.waiting) == [11, 14, 15, 16]
        running.cancel()

    asyncio.run(scenario())


def test_at_async_level_zero_nothing_starts_that_the_next_policy_should_generate():
    async def scenario() -> None:
        events: list[Event] = []
        script = Script()
        dispatcher, buffer = make_dispatcher(events, script, max_async_level=0)
        running = asyncio.create_task(dispatcher.run())
        await settle()
        for group_id in list(script.waiting):
            script.finish(group_id, version=0)
        await settle()
        assert not script.waiting
        assert buffer.take_batch(Step(1), num_groups=4)
        dispatcher.step = Step(2)
        dispatcher.waker.ring()
        await settle()
        assert not script.waiting
        dispatcher.version = PolicyVersion(1)
        dispatcher.waker.ring()
        await settle()
        assert len(script.waiting) == 4
        running.cancel()

    asyncio.run(scenario())


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), max_async_level=st.integers(0, 3), max_off_policy_steps=st.integers(0, 4))
def test_no_group_is_lost_or_doubled_whatever_happens(seed, max_async_level, max_off_policy_steps):
    events: list[Event] = []
    asyncio.run(play(random.Random(seed), events, max_async_level, max_off_policy_steps))
    check_history(events, max_async_level=max_async_level, max_off_policy_steps=max_off_policy_steps)


async def play(rng: random.Random, events: list[Event], max_async_level: int, max_off_policy_steps: int) -> None:
    script = Script()
    dispatcher, buffer = make_dispatcher(
        events, script, max_async_level=max_async_level, max_off_policy_steps=max_off_policy_steps
    )
    running = asyncio.create_task(dispatcher.run())
    step, published = Step(1), 0
    for _ in range(rng.randint(20, 120)):
        await settle()
        match rng.randrange(5):
            case 0 | 1 if script.waiting:
                group_id = rng.choice(list(script.waiting))
                rewards = rng.choice([(0.0, 1.0), (1.0, 1.0), (0.5, 0.25)])
                script.finish(group_id, version=dispatcher.version, rewards=rewards)
            case 2 if script.waiting and rng.random() < 0.4:
                script.fail(rng.choice(list(script.waiting)))
            case 3 if buffer.take_batch(step, num_groups=4):
                published, step = step, Step(step + 1)
                dispatcher.step = step
                dispatcher.waker.ring()
            case 4 if dispatcher.version < published:
                dispatcher.version = PolicyVersion(rng.randint(dispatcher.version + 1, published))
                dispatcher.waker.ring()
            case _:
                pass
    await settle()
    in_flight = set(buffer.snapshot().in_flight)
    ready = {group.group_id for group in buffer.snapshot().ready}
    ended = {event.group_id for event in events if isinstance(event, Drop | Filter)}
    batched = {group_id for event in events if isinstance(event, BatchFormed) for group_id in event.group_ids}
    dispatched = {event.group_id for event in events if isinstance(event, Dispatch)}
    assert dispatched == in_flight | ready | ended | batched
    assert sum(map(len, (in_flight, ready, ended, batched))) == len(dispatched)
    assert not running.done()
    running.cancel()


def check_history(events: list[Event], *, max_async_level: int, max_off_policy_steps: int) -> None:
    counts = Counter(event.group_id for event in events if isinstance(event, Dispatch))
    assert set(counts.values()) <= {1}
    assert list(counts) == sorted(counts)
    step = Step(1)
    for event in events:
        if isinstance(event, BatchFormed):
            assert event.newest_version <= event.step - 1
            assert event.step - 1 - event.oldest_version <= max_off_policy_steps
            step = Step(event.step + 1)
        elif isinstance(event, Dispatch):
            assert event.version >= required_version(step=step, max_async_level=max_async_level)
    assert all(isinstance(event.group_id, int) for event in events if isinstance(event, Finish))
    assert GroupId(0) in counts
