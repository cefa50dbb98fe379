"""Test the dispatcher with groups that end when the test says so. Random schedules of whole runs are in test_histories.py."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from support.fake_servers import FakeServers
from support.groups import make_sample
from support.virtual_time import virtually
from trivet.algorithms.advantages import mean_baseline
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import RolloutFailed, WorkerLost
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.dispatcher import Dispatcher
from trivet.orchestrator.sampler import Draw, ExampleSampler, SamplerState
from trivet.wire.events import Dispatch, Drop, Event, Finish
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId, PolicyVersion, Step

EXAMPLES = {"toy": [f"hash-{index}" for index in range(7)]}


class Script:
    """Groups that end when the test says so."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[list[Rollout]]] = {}
        self.servers: list[str] = []
        """The servers of every try, in order."""
        self.started_at: list[float] = []

    async def __call__(self, draw: Draw, base_url: str) -> list[Rollout]:
        future = asyncio.get_running_loop().create_future()
        self.waiting[draw.group_id] = future
        self.servers.append(base_url)
        self.started_at.append(asyncio.get_running_loop().time())
        try:
            return await future
        finally:
            if self.waiting.get(draw.group_id) is future:
                del self.waiting[draw.group_id]

    def finish(self, group_id: int, *, version: int = 0, rewards: tuple[float, float] = (0.0, 1.0)) -> None:
        rollouts = [Rollout(index=i, reward=reward, samples=[make_sample(version=version)]) for i, reward in enumerate(rewards)]
        self.waiting[group_id].set_result(rollouts)

    def finish_with(self, group_id: int, rollouts: list[Rollout]) -> None:
        self.waiting[group_id].set_result(rollouts)

    def fail(self, group_id: int, error: Exception) -> None:
        self.waiting[group_id].set_exception(error)


class Stage:
    """A dispatcher with everything that it needs."""

    def __init__(
        self,
        *,
        resumed_draws: Sequence[int] = (),
        servers: FakeServers | None = None,
        max_async_level: int = 1,
        max_off_policy_steps: int = 8,
        tasks_per_minute: int | None = None,
        max_rollouts_in_flight: int = 8,
        zero_truncated_completions: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.script = Script()
        self.servers = servers or FakeServers()
        self.buffer = GroupBuffer(
            write_event=self.events.append, online_difficulty_filtering=True, max_off_policy_steps=max_off_policy_steps
        )
        sampler = ExampleSampler(
            EXAMPLES, seed=0, state=SamplerState(next_group_id=GroupId(max(resumed_draws, default=-1) + 1))
        )
        draws = {group_id: sampler.preview(group_id + 1)[group_id] for group_id in resumed_draws}
        self.dispatcher = Dispatcher(
            OrchestratorConfig(
                batch_size=8,
                rollouts_per_example=2,
                max_concurrent=max_rollouts_in_flight,
                max_async_level=max_async_level,
                seq_len=64,
                tasks_per_minute=tasks_per_minute,
                zero_truncated_completions=zero_truncated_completions,
            ),
            sampler=sampler,
            buffer=self.buffer,
            run_group=self.script,
            servers=self.servers,  # type: ignore[arg-type]  stand in for ServerPool
            advantage=mean_baseline,
            on_group_end=lambda: None,
            clock=asyncio.get_running_loop().time,
        )
        self.dispatcher.resume(list(draws.values()))

    def set(self, *, step: int | None = None, version: int | None = None) -> None:
        if step is not None:
            self.dispatcher.step = Step(step)
        if version is not None:
            self.dispatcher.version = PolicyVersion(version)
        self.dispatcher.changed.notify()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


@contextlib.asynccontextmanager
async def staged(**options) -> AsyncIterator[Stage]:
    """Make a stage whose dispatcher runs."""
    stage = Stage(**options)
    running = asyncio.create_task(stage.dispatcher.run())
    await settle()
    yield stage
    assert not running.done()
    running.cancel()


async def settle() -> None:
    """Let every task go as far as it can without time passing."""
    for _ in range(12):
        await asyncio.sleep(0)


@virtually
async def test_groups_in_flight_fill_the_limit_and_are_replaced() -> None:
    async with staged() as stage:
        assert sorted(stage.script.waiting) == [0, 1, 2, 3]
        stage.script.finish(2)
        await settle()
        assert sorted(stage.script.waiting) == [0, 1, 3, 4]
        assert stage.buffer.num_ready == 1


@virtually
async def test_groups_of_the_checkpoint_start_first_under_their_old_ids() -> None:
    async with staged(resumed_draws=[11, 14]) as stage:
        assert list(stage.script.waiting) == [11, 14, 15, 16]


@virtually
async def test_at_async_level_zero_nothing_starts_that_the_next_policy_should_generate() -> None:
    async with staged(max_async_level=0) as stage:
        for group_id in list(stage.script.waiting):
            stage.script.finish(group_id)
        await settle()
        assert not stage.script.waiting
        assert stage.buffer.take_batch(Step(1), num_groups=4)
        stage.set(step=2)
        await asyncio.sleep(20)
        assert not stage.script.waiting
        stage.set(version=1)
        await settle()
        assert len(stage.script.waiting) == 4


@virtually
async def test_a_group_spreads_over_the_servers_by_load_and_stays_on_one() -> None:
    async with staged(servers=FakeServers("http://a", "http://b")) as stage:
        assert stage.script.servers == ["http://a", "http://b", "http://a", "http://b"]
        assert [event.server for event in stage.of(Dispatch)] == stage.script.servers
        stage.script.finish(1)
        await settle()
        assert stage.script.servers[-1] == "http://b"


@virtually
async def test_without_a_server_groups_wait_and_keep_their_ids() -> None:
    servers = FakeServers()
    servers.roots.clear()
    async with staged(servers=servers) as stage:
        assert stage.events == []
        servers.roots.append("http://server")
        stage.dispatcher.changed.notify()
        await settle()
        assert [event.group_id for event in stage.of(Dispatch)] == [0, 1, 2, 3]


@virtually
async def test_groups_of_a_server_that_goes_down_start_again_on_another_under_their_ids() -> None:
    servers = FakeServers("http://a", "http://b")
    async with staged(servers=servers) as stage:
        servers.roots.remove("http://a")
        stage.dispatcher.server_down("http://a")
        await settle()
        assert [event.group_id for event in stage.of(Dispatch)] == [0, 1, 2, 3, 0, 2]
        assert stage.script.servers[4:] == ["http://b", "http://b"]
        assert stage.buffer.num_in_flight == 4
        assert servers.in_flight["http://a"] == 0


@virtually
async def test_a_failure_that_is_the_servers_fault_costs_no_group_and_one_of_the_environment_costs_its_own() -> None:
    async with staged() as stage:
        stage.script.fail(0, RolloutFailed("the judge is down: 503", kind="HTTPError"))
        await settle()
        stage.servers.at_fault.add("http://server")
        stage.script.fail(1, ConnectionError("refused"))
        await settle()
        [drop] = stage.of(Drop)
        assert (drop.group_id, drop.reason) == (0, "failed: RolloutFailed: the judge is down: 503")
        assert [lost.reason for lost in stage.buffer.counters.failed] == ["HTTPError"]
        assert [event.group_id for event in stage.of(Dispatch)] == [0, 1, 2, 3, 4, 1]


@virtually
async def test_a_group_that_loses_its_worker_each_time_is_tried_ever_more_slowly_and_then_failed() -> None:
    async with staged(max_rollouts_in_flight=2) as stage:
        pauses: list[float] = []
        for _ in range(5):
            lost_at = asyncio.get_running_loop().time()
            stage.script.fail(0, WorkerLost("ended with SIGKILL"))
            await asyncio.sleep(10)
            pauses.append(stage.script.started_at[-1] - lost_at)
        assert pauses == pytest.approx([0, 1, 2, 4, 0], abs=0.01)  # the last is that of another group
        [drop] = stage.of(Drop)
        assert drop.reason.startswith("failed: WorkerLost: lost 5 times, the last time because ended with SIGKILL")
        assert list(stage.script.waiting) == [1]


@virtually
async def test_tokens_older_than_what_the_server_held_are_not_kept() -> None:
    async with staged() as stage:
        stage.script.finish(3)
        stage.set(version=2)
        await settle()
        stage.script.finish(4, version=0)  # dispatched at policy 2
        await settle()
        assert [event.group_id for event in stage.of(Finish)] == [3]
        assert [event.group_id for event in stage.of(Dispatch)].count(4) == 2


@virtually
async def test_a_group_that_outlives_max_off_policy_steps_is_cancelled_and_one_that_survives_a_load_is_kept() -> None:
    async with staged(max_off_policy_steps=2) as stage:
        stage.set(version=1, step=3)
        await settle()
        assert not stage.of(Drop)
        stage.script.finish(0)
        await settle()
        stage.set(step=4)
        await settle()
        assert {event.group_id for event in stage.of(Drop)} == {1, 2, 3}
        assert {event.reason for event in stage.of(Drop)} == {"stale"}
        assert not {1, 2, 3} & set(stage.script.waiting)
        assert stage.servers.in_flight["http://server"] == 2 * len(stage.script.waiting)


@virtually
async def test_no_more_rollouts_start_per_minute_than_allowed() -> None:
    async with staged(tasks_per_minute=60) as stage:
        started: list[float] = []
        while asyncio.get_running_loop().time() < 120:
            for group_id in list(stage.script.waiting):
                started.append(asyncio.get_running_loop().time())
                stage.script.finish(group_id, rewards=(1.0, 1.0))  # filtered, so that the buffer never fills
            await asyncio.sleep(0.25)
        assert 2 * len(started) == pytest.approx(120 + 5, abs=4)


@virtually
async def test_the_limit_of_rollouts_in_flight_can_change_while_groups_run() -> None:
    async with staged() as stage:
        stage.dispatcher.max_in_flight = 4
        stage.script.finish(0)
        stage.script.finish(1)
        await settle()
        assert sorted(stage.script.waiting) == [2, 3]
        stage.dispatcher.max_in_flight = 6
        stage.dispatcher.changed.notify()
        await settle()
        assert sorted(stage.script.waiting) == [2, 3, 4]
