"""Test in virtual time how a pool has its servers sleep while the trainer learns."""

import asyncio

import pytest

from support.server_pools import A, B, Site, policy, simulated, started
from support.simulated_run import START_DIGEST, publish_policies
from support.virtual_time import run_virtually
from trivet.config.layout import RunLayout
from trivet.errors import InferenceError, PolicyRefused
from trivet.wire.events import ServerDown
from trivet.wire.versions import PolicyStatus, PolicyVersion


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> RunLayout:
    return RunLayout(publish_policies(tmp_path_factory.mktemp("published"), count=3))


@simulated(A, B, limit_s=60)
async def test_servers_that_sleep_load_even_the_policy_that_they_had(site: Site, layout) -> None:
    await site.pool.ensure_policy(policy(layout, 1))
    await site.pool.sleep()
    assert [server.status.asleep for server in site.servers.values()] == [True, True]
    assert site.pool.roots == [A, B]
    # The orchestrator was started again: it does not know that it had put them to sleep.
    await site.pool.ensure_policy_on_all(policy(layout, 1))
    assert [server.status.asleep for server in site.servers.values()] == [False, False]


@simulated(A, B, limit_s=120)
async def test_a_server_that_may_be_starting_is_waited_for_and_sleeps_before_the_batch_is_sent(site: Site) -> None:
    crash = asyncio.create_task(site.servers[A].crash(70.0))
    await asyncio.sleep(0)
    await site.pool.sleep()
    assert 70 <= asyncio.get_running_loop().time() < 75
    assert site.servers[A].status.asleep
    assert site.pool.roots == [B]
    assert site.lost == [A]
    await crash


@simulated(A, ready_s=100.0, limit_s=1200)
async def test_a_lone_server_that_was_started_again_sleeps_for_longer_than_a_run_may_be_without_servers(
    site: Site, layout
) -> None:
    crash = asyncio.create_task(site.servers[A].crash(70.0))
    await asyncio.sleep(0)
    await site.pool.sleep()
    await asyncio.sleep(1000)  # the trainer's step
    assert not site.running.done()
    await site.pool.ensure_policy(policy(layout, 1))
    await asyncio.sleep(5)
    assert site.pool.roots == [A]
    await crash


def test_an_elastic_server_whose_process_ended_is_not_waited_for_and_takes_no_rollouts():
    async def scenario() -> None:
        a, b = f"{A}:80", f"{B}:80"
        site = Site(a, b, names=[["a", "b"]])
        async with started(site):
            crash = asyncio.create_task(site.servers[a].crash(1.0))
            await asyncio.sleep(0)
            await site.pool.sleep()
            assert asyncio.get_running_loop().time() < 1
            assert site.pool.roots == [b]
            assert site.lost == [a]
            await crash

    run_virtually(scenario(), limit_s=60)


@simulated(A, B, limit_s=700)
async def test_a_server_that_does_not_answer_is_waited_for_by_name_until_it_sleeps(site: Site, caplog) -> None:
    site.servers[A].is_frozen = True
    sleeping = asyncio.create_task(site.pool.sleep())
    await asyncio.sleep(550)
    assert not sleeping.done()
    site.servers[A].is_frozen = False
    await sleeping
    assert site.servers[A].status.asleep
    assert "the batch waits for servers to free their GPU memory" in caplog.text
    assert f"{A} was not answered within 300 s" in caplog.text


@simulated(A, B, ready_s=700.0, limit_s=1200)
async def test_a_server_that_never_sleeps_ends_the_run_with_what_it_answered(site: Site) -> None:
    site.servers[A].is_frozen = True
    with pytest.raises(
        InferenceError,
        match=r"it does not sleep after 9.. s \(client.wait_for_ready_timeout = 700\): http://a was not answered",
    ):
        await site.pool.sleep()


def test_a_server_that_was_not_started_to_sleep_ends_the_run_at_once():
    async def refuse() -> None:
        raise PolicyRefused("POST http://a/sleep was answered with 409: this server was started without it")

    async def scenario() -> None:
        site = Site(A)
        async with started(site):
            site.servers[A].sleep = refuse
            with pytest.raises(
                InferenceError, match=r"sleep_servers = true, but POST .*, or set orchestrator.sleep_servers = false"
            ):
                await site.pool.sleep()
            assert asyncio.get_running_loop().time() < 1

    run_virtually(scenario(), limit_s=60)


@simulated(A, B, limit_s=400)
async def test_no_server_is_admitted_before_the_sleepers_load_the_next_policy(site: Site, layout) -> None:
    crash = asyncio.create_task(site.servers[A].crash(8.0))
    await asyncio.sleep(7)
    assert site.pool.roots == [B]
    await site.pool.sleep()
    await crash  # it is back, awake, with the start model
    await asyncio.sleep(300)
    assert site.pool.roots == [B]
    assert site.servers[B].status.asleep
    await site.pool.ensure_policy(policy(layout, 1))
    await asyncio.sleep(5)
    assert site.pool.roots == [A, B]
    assert {server.status.version for server in site.servers.values()} == {1}


@simulated(A, B, limit_s=400)
async def test_a_server_that_is_marked_unhealthy_while_it_sleeps_is_not_woken(site: Site, layout) -> None:
    await site.pool.sleep()
    site.servers[A].is_frozen = True
    await asyncio.sleep(150)
    assert site.pool.roots == [B]
    site.servers[A].is_frozen = False
    await asyncio.sleep(100)
    assert site.servers[A].status.asleep
    await site.pool.ensure_policy(policy(layout, 1))
    await asyncio.sleep(5)
    assert site.pool.roots == [A, B]


@simulated(A, B, limit_s=400)
async def test_a_server_that_loads_to_be_admitted_sleeps_after_it(site: Site, layout) -> None:
    await site.pool.ensure_policy(policy(layout, 1))
    site.servers[A].load_s = 100.0
    crash = asyncio.create_task(site.servers[A].crash(5.5))
    await crash
    await asyncio.sleep(35)  # by now it is being asked to load
    before = asyncio.get_running_loop().time()
    await site.pool.sleep()
    assert asyncio.get_running_loop().time() - before > 50
    assert site.servers[A].status == PolicyStatus(version=PolicyVersion(1), digest=policy(layout, 1).digest or "", asleep=True)
    await asyncio.sleep(60)
    assert site.pool.roots == [B]
    assert site.servers[A].status.asleep


@simulated(A, B, limit_s=60)
async def test_a_server_that_was_started_again_while_it_should_sleep_is_marked_unhealthy(site: Site) -> None:
    await site.pool.sleep()
    site.servers[A].status = PolicyStatus(version=PolicyVersion(0), digest=START_DIGEST)
    await asyncio.sleep(6)
    assert site.pool.roots == [B]
    assert "it does not sleep any more" in site.of(ServerDown)[0].reason
