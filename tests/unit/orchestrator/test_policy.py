import asyncio
import contextlib
from collections.abc import Callable

import pytest

from support.fake_servers import FakeServers
from support.virtual_time import run_virtually, virtually
from trivet.client.server import TargetPolicy
from trivet.config.layout import RunLayout
from trivet.errors import WaitTimeout
from trivet.faults import damage
from trivet.orchestrator.policy import READER, PolicyWatcher
from trivet.weights.manifest import offer_policy, read_manifest
from trivet.weights.publish import publish
from trivet.weights.retention import LiveReaders
from trivet.wire.versions import PolicyVersion, Step


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    return RunLayout(tmp_path)


def publish_policy(layout: RunLayout, version: int) -> None:
    publish(
        layout,
        version=PolicyVersion(version),
        run_id="r",
        write=lambda directory: (directory / "model.safetensors").write_bytes(bytes([version])) and None,
    )


def make_watcher(
    layout: RunLayout,
    servers: FakeServers,
    *,
    strict: bool = False,
    on_policy_served: Callable[[PolicyVersion], None] = lambda version: None,
) -> PolicyWatcher:
    return PolicyWatcher(
        layout=layout,
        servers=servers,
        max_async_level=1,
        is_strict=strict,
        timeout_s=60.0,
        on_policy_served=on_policy_served,
        clock=asyncio.get_running_loop().time,
    )


@contextlib.asynccontextmanager
async def running(watcher: PolicyWatcher):
    task = asyncio.create_task(watcher.run())
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def versions(servers: FakeServers) -> list[int]:
    return [policy.version for policy in servers.loaded]


@pytest.mark.parametrize(("strict", "step", "expected"), [(False, 3, 3), (True, 4, 2)])
@virtually
async def test_the_newest_policy_is_loaded_or_in_a_strict_run_exactly_the_one_that_lags(layout, strict, step, expected) -> None:
    for version in (1, 2, 3):
        publish_policy(layout, version)
    servers, loads = FakeServers(), list[PolicyVersion]()
    watcher = make_watcher(layout, servers, strict=strict, on_policy_served=loads.append)
    watcher.step = Step(step)
    async with running(watcher):
        await asyncio.sleep(1)
    assert versions(servers) == loads == [expected]
    assert servers.loaded[0].digest == read_manifest(layout.weights_step(expected)).digest
    assert LiveReaders(layout).versions() == {READER: expected}


@virtually
async def test_a_trainer_that_publishes_nothing_is_named_when_its_time_is_over(layout) -> None:
    watcher = make_watcher(layout, FakeServers())
    watcher.step = Step(5)
    with pytest.raises(WaitTimeout, match="waited 60 s for policy 3 to fill batch 5"):
        await watcher.run()
    assert asyncio.get_running_loop().time() == pytest.approx(60, abs=1)


@virtually
async def test_nothing_is_loaded_while_the_policy_is_pinned_and_the_newest_is_once_the_last_holder_leaves(layout) -> None:
    servers = FakeServers()
    watcher = make_watcher(layout, servers)
    async with running(watcher) as task:
        async with watcher.pinned() as version:
            async with watcher.pinned() as inner:
                for published in (1, 2):
                    publish_policy(layout, published)
                    await asyncio.sleep(1)
            await asyncio.sleep(1)
            assert (version, inner, servers.loaded) == (0, 0, [])
        await asyncio.sleep(1)
        assert versions(servers) == [2]
        assert not task.done()


@virtually
async def test_a_pin_longer_than_the_deadline_is_not_taken_for_a_trainer_that_hangs(layout) -> None:
    servers = FakeServers()
    watcher = make_watcher(layout, servers)
    async with running(watcher) as task:
        async with watcher.pinned():
            publish_policy(layout, 1)
            watcher.step = Step(3)  # needs policy 1, which is there and may not be loaded
            await asyncio.sleep(100)
        await asyncio.sleep(1)
        assert not task.done()
        assert versions(servers) == [1]


def test_a_pin_waits_for_a_load_in_progress_and_holds_what_it_brought(layout):
    class SlowServers(FakeServers):
        async def ensure_policy(self, policy: TargetPolicy) -> None:
            await asyncio.sleep(10)
            await super().ensure_policy(policy)

    async def scenario() -> None:
        publish_policy(layout, 1)
        watcher = make_watcher(layout, SlowServers())
        async with running(watcher):
            await asyncio.sleep(1)
            async with watcher.pinned() as version:
                assert asyncio.get_running_loop().time() == pytest.approx(10)
                assert version == 1

    run_virtually(scenario(), limit_s=100)


@virtually
async def test_servers_that_fetch_are_told_what_and_where_from(layout) -> None:
    servers = FakeServers()
    servers.sources = ["http://origin:5556", "http://server:8000"]
    watcher = make_watcher(layout, servers)
    publish_policy(layout, 1)
    await watcher.await_policy(PolicyVersion(1))
    publish_policy(layout, 2)
    await watcher.ensure_policy(PolicyVersion(2))
    offers = [offer_policy(layout.weights_step(version), sources=servers.sources) for version in (1, 2)]
    assert [policy.offer for policy in servers.loaded] == offers


@virtually
async def test_a_fresh_run_starts_from_the_start_model_and_says_so_to_whoever_removes_old_weights(layout) -> None:
    servers = FakeServers()
    await make_watcher(layout, servers).start_from_base(reload=True)
    assert servers.loaded == [TargetPolicy(version=PolicyVersion(0), digest=None, directory=None)]
    assert LiveReaders(layout).versions() == {READER: 0}


@pytest.mark.parametrize("is_damaged", [False, True])
@virtually
async def test_a_resume_waits_until_its_policy_is_published_again(layout, is_damaged) -> None:
    servers = FakeServers()
    watcher = make_watcher(layout, servers)
    if is_damaged:
        publish_policy(layout, 6)
        damage(next(layout.weights_step(6).glob("*.safetensors")), is_truncated=True)
    waiting = asyncio.create_task(watcher.await_policy(PolicyVersion(6)))
    await asyncio.sleep(30)
    assert not waiting.done()
    publish_policy(layout, 6)
    await waiting
    assert (versions(servers), watcher.version) == ([6], 6)


@virtually
async def test_a_resume_whose_policy_never_appears_ends(layout) -> None:
    with pytest.raises(WaitTimeout, match="step_6 to resume from"):
        await make_watcher(layout, FakeServers()).await_policy(PolicyVersion(6))
