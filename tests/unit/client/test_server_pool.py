import asyncio
from dataclasses import replace

import pytest

from support.server_pools import START, A, B, Site, policy, simulated, started
from support.simulated_run import START_DIGEST, SimulatedServer, publish_policies
from support.virtual_time import run_virtually
from trivet.config.layout import RunLayout
from trivet.errors import ForeignPolicy, InferenceError, PolicyRefused
from trivet.weights.manifest import offer_policy
from trivet.wire.events import Load, ServerDown, ServerUp
from trivet.wire.versions import PolicyStatus, PolicyVersion


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> RunLayout:
    return RunLayout(publish_policies(tmp_path_factory.mktemp("published"), count=5))


@simulated(A, B, limit_s=60)
async def test_a_policy_is_loaded_on_every_server_with_its_digest_on_record(site: Site, layout) -> None:
    await site.pool.ensure_policy(policy(layout, 2))
    loads = [(event.server, event.version, event.digest) for event in site.of(Load)]
    digest = policy(layout, 2).digest
    assert loads[:2] == [(A, 0, START_DIGEST), (B, 0, START_DIGEST)]
    assert sorted(loads[2:]) == [(A, 2, digest), (B, 2, digest)]
    assert {server.status.version for server in site.servers.values()} == {2}


@simulated(A, B, limit_s=60)
async def test_rollouts_go_to_the_server_with_the_fewest(site: Site) -> None:
    picked = [site.pool.pick(num_rollouts=size) for size in (8, 2, 2, 2)]
    assert picked == [A, B, B, B]
    site.pool.release(A, num_rollouts=8)
    assert site.pool.pick(num_rollouts=1) == A


@simulated(A, B, limit_s=60)
async def test_a_full_server_comes_after_one_that_has_capacity(site: Site) -> None:
    assert [site.pool.pick(num_rollouts=4) for _ in range(2)] == [A, B]
    site.servers[A].kv_usage = 0.95
    await site.pool.server_loads()
    assert [site.pool.pick(num_rollouts=1) for _ in range(2)] == [A, B], "nobody asked for limits"
    await site.pool.server_loads(does_limit=True)
    assert [site.pool.pick(num_rollouts=1) for _ in range(3)] == [B, B, B]
    site.pool.release(A, num_rollouts=1)
    assert site.pool.pick(num_rollouts=1) == A
    site.servers[B].kv_usage = 0.95
    await site.pool.server_loads(does_limit=True)
    assert site.pool.pick(num_rollouts=1) == A, "both are full, and it has fewer"


@simulated(A, B, limit_s=200)
async def test_a_server_that_crashed_takes_rollouts_again_only_once_it_holds_what_the_others_hold(site: Site, layout) -> None:
    await site.pool.ensure_policy(policy(layout, 1))
    crash = asyncio.create_task(site.servers[A].crash(30.0))
    await asyncio.sleep(6)
    assert (site.pool.roots, site.lost) == ([B], [A])
    await site.pool.ensure_policy(policy(layout, 2))
    await asyncio.sleep(60)
    assert site.pool.roots == [A, B]
    assert site.servers[A].status.version == 2
    await crash
    [down] = site.of(ServerDown)
    assert "ConnectError" in down.reason
    ups = [(event.server, event.version) for event in site.of(ServerUp)]
    assert ups == [(A, 0), (B, 0), (A, 2)]


@simulated(A, B, limit_s=60)
async def test_a_server_that_was_started_again_between_two_questions_is_found_by_what_it_holds(site: Site, layout) -> None:
    await site.pool.ensure_policy(policy(layout, 1))
    site.servers[A].status = PolicyStatus(version=PolicyVersion(0), digest=START_DIGEST)
    await asyncio.sleep(20)
    assert "it was started again" in site.of(ServerDown)[0].reason
    assert site.servers[A].status.version == 1
    assert site.pool.roots == [A, B]


@simulated(A, B, limit_s=200)
async def test_a_server_that_fails_a_load_is_set_aside_and_the_others_go_on(site: Site, layout) -> None:
    crash = asyncio.create_task(site.servers[B].crash(20.0))
    await asyncio.sleep(0)
    await site.pool.ensure_policy(policy(layout, 1))
    assert site.pool.roots == [A]
    await asyncio.sleep(60)
    assert site.pool.roots == [A, B]
    await crash


@simulated(A, B, limit_s=300)
async def test_a_server_that_was_away_for_long_takes_rollouts_as_soon_as_it_is_back(site: Site) -> None:
    crash = asyncio.create_task(site.servers[A].crash(120.0))
    await asyncio.sleep(0)
    assert await site.pool.is_at_fault(A)
    await crash
    await asyncio.sleep(3)
    assert site.pool.roots == [A, B]


@pytest.mark.parametrize(
    ("load_s", "hangs_at_s", "rounds_s", "roots"),
    [
        pytest.param(20.0, None, [20, 35, 20, 20], [A, B], id="as-fast-as-the-other"),
        pytest.param(20.0, 38.0, [20, 50, 20, 20], [A], id="hangs-in-its-second-load"),
        pytest.param(50.0, None, [20, 20, 20, 20], [A], id="too-slow"),
    ],
)
@simulated(A, B, limit_s=400)
async def test_a_server_that_comes_back_is_admitted_although_one_load_follows_the_other_and_a_slow_one_delays_nobody(
    site: Site, layout, load_s: float, hangs_at_s: float | None, rounds_s: list[int], roots: list[str]
) -> None:
    loop, times = asyncio.get_running_loop(), list[float]()
    site.servers[A].load_s, site.servers[B].load_s = 20.0, load_s
    crash = asyncio.create_task(site.servers[B].crash(15.0))
    await asyncio.sleep(0)
    assert await site.pool.is_at_fault(B)
    if hangs_at_s is not None:
        loop.call_later(hangs_at_s, setattr, site.servers[B], "is_frozen", True)
    for version in (1, 2, 3, 4):
        times.append(loop.time())
        await site.pool.ensure_policy(policy(layout, version))
        times[-1] = round(loop.time() - times[-1])
    assert (times, site.pool.roots) == (rounds_s, roots)
    await crash


@simulated(A, B, limit_s=400)
async def test_a_server_that_stops_answering_is_set_aside_after_some_time_and_a_late_answer_is_forgiven(site: Site) -> None:
    site.servers[A].is_frozen = True
    await asyncio.sleep(50)
    site.servers[A].is_frozen = False
    await asyncio.sleep(50)
    assert site.of(ServerDown) == []
    site.servers[A].is_frozen = True
    await asyncio.sleep(150)
    assert site.pool.roots == [B]
    assert "3 times in a row" in site.of(ServerDown)[0].reason


@simulated(A, limit_s=60)
async def test_after_a_failed_group_the_server_is_asked_whether_it_was_its_fault(site: Site) -> None:
    assert not await site.pool.is_at_fault(A)
    crash = asyncio.create_task(site.servers[A].crash(1.0))
    await asyncio.sleep(0)
    assert await asyncio.gather(*(site.pool.is_at_fault(A) for _ in range(5))) == [True] * 5
    assert site.lost == [A]
    await crash


@simulated(A, ready_s=100.0, limit_s=200)
async def test_a_run_without_any_server_ends_when_the_time_for_one_to_come_back_is_over(site: Site) -> None:
    site.servers[A].is_down = True
    assert site.pool.pick(num_rollouts=1) == A
    with pytest.raises(ExceptionGroup) as caught:
        await site.running
    [error] = caught.value.exceptions
    assert isinstance(error, InferenceError)
    assert "no inference server was left for 10" in str(error)
    assert "ConnectError" in str(error)
    assert site.pool.pick(num_rollouts=1) is None


@simulated(A, limit_s=200)
async def test_a_load_waits_for_a_server_when_none_is_there(site: Site, layout) -> None:
    crash = asyncio.create_task(site.servers[A].crash(40.0))
    await asyncio.sleep(0)
    await site.pool.ensure_policy(policy(layout, 3))
    assert asyncio.get_running_loop().time() > 40
    assert site.servers[A].status.version == 3
    await crash


def test_sources_are_the_origin_and_the_servers_that_others_can_reach() -> None:
    async def scenario() -> None:
        roots = ("http://a", "http://127.0.0.1:8000", "http://localhost:8001", "http://[::1]:8000", "http://10.0.0.2:8000")
        site = Site(*roots)
        async with started(site):
            assert site.pool.sources == []
            site.pool._origin = "http://origin:5556"
            assert site.pool.sources == ["http://origin:5556", "http://a", "http://10.0.0.2:8000"]
            site.pool.mark_unhealthy(site.pool.servers["http://a"], "test")
            assert site.pool.sources == ["http://origin:5556", "http://10.0.0.2:8000"]
        site = Site(A, B)
        site.pool._origin = "http://origin:5556"
        await site.pool.start()
        assert site.pool.sources == ["http://origin:5556", A, B], "a resumed run loads its first policy on all of them at once"
        await site.pool.aclose()

    run_virtually(scenario(), limit_s=60)


def test_a_fetch_of_minutes_is_waited_for_and_a_server_that_is_much_later_is_admitted_afterwards(layout) -> None:
    """In a tree the second half of the servers fetches after the first. A broken link takes much longer."""

    async def scenario() -> None:
        site = Site(*(f"http://server-{index}" for index in range(6)))
        async with started(site):
            target = policy(layout, 1)
            offer = offer_policy(layout.weights_step(1), sources=["http://origin"])
            for server, seconds in zip(site.servers.values(), (200, 200, 210, 390, 400, 3000), strict=True):
                server.load_s = seconds
            await site.pool.ensure_policy(replace(target, offer=offer))
            assert asyncio.get_running_loop().time() == pytest.approx(420, abs=10)
            assert site.lost == ["http://server-5"]
            await asyncio.sleep(3100)
            assert len(site.pool.admitted) == 6
            assert {server.status.digest for server in site.servers.values()} == {target.digest}

    run_virtually(scenario(), limit_s=10_000)


def test_a_weights_directory_that_every_server_refuses_ends_the_run(layout):
    class Refusing(SimulatedServer):
        async def update_weights(self, directory, *, transfer=None) -> PolicyStatus:
            raise PolicyRefused("409: model.safetensors is altered")

    async def scenario() -> None:
        site = Site(A, B)
        async with started(site):
            for server in site.servers.values():
                server.__class__ = Refusing
            with pytest.raises(PolicyRefused, match="altered"):
                await site.pool.ensure_policy(policy(layout, 1))

    run_virtually(scenario(), limit_s=60)


@simulated(A, limit_s=60)
async def test_a_server_that_another_run_uses_ends_the_run(site: Site, layout) -> None:
    site.servers[A].status = PolicyStatus(version=PolicyVersion(7), digest="foreign")
    with pytest.raises(ExceptionGroup) as caught:
        await site.running
    [error] = caught.value.exceptions
    assert isinstance(error, ForeignPolicy)
    assert "another run uses the same server" in str(error)


def test_a_run_that_does_not_reset_its_servers_refuses_what_they_hold():
    async def scenario() -> None:
        site = Site(A)
        site.servers[A].status = PolicyStatus(version=PolicyVersion(4), digest="old")
        await site.pool.start()
        with pytest.raises(InferenceError, match="holds policy 4 and the run starts from the base model"):
            await site.pool.ensure_policy_on_all(START, reset=False)
        await site.pool.ensure_policy_on_all(START, reset=True)
        assert site.servers[A].status.version == 0
        await site.pool.aclose()

    run_virtually(scenario(), limit_s=60)


def test_every_server_loads_the_policy_of_a_resumed_run_at_once(layout):
    async def scenario() -> None:
        site = Site(*(f"http://server-{number}" for number in range(20)))
        await site.pool.start()
        before = asyncio.get_running_loop().time()
        await site.pool.ensure_policy_on_all(policy(layout, 1))
        assert asyncio.get_running_loop().time() - before < 2  # one load takes 1 s
        assert len(site.pool.roots) == 20
        await site.pool.aclose()

    run_virtually(scenario(), limit_s=60)


@simulated(*(f"http://server-{number}" for number in range(4)), limit_s=600)
async def test_a_server_that_is_lost_does_not_hold_up_a_policy_that_the_others_load(site: Site, layout) -> None:
    site.servers["http://server-0"].is_frozen = True
    before = asyncio.get_running_loop().time()
    await site.pool.ensure_policy(policy(layout, 1))
    assert asyncio.get_running_loop().time() - before < 32  # 1 s and 30 s more
    assert site.lost == ["http://server-0"]
    assert len(site.pool.roots) == 3
    site.servers["http://server-0"].is_frozen = False
    await asyncio.sleep(40)
    assert len(site.pool.roots) == 4
    assert site.servers["http://server-0"].status.version == 1


@simulated(A, B, limit_s=600)
async def test_a_slow_server_is_not_given_up_for_one_that_failed(site: Site, layout) -> None:
    site.servers[A].is_down = True
    site.servers[B].load_s = 100.0
    await site.pool.ensure_policy(policy(layout, 1))
    assert site.pool.roots == [B]
    assert site.servers[B].status.version == 1


def test_named_servers_that_do_not_answer_do_not_hold_up_the_start(layout):
    async def scenario() -> None:
        names = [f"server-{number}" for number in range(5)]
        site = Site(*(f"http://{name}:80" for name in names), names=[names])
        for name in names[1:]:
            site.servers[f"http://{name}:80"].is_frozen = True
        await site.pool.start()
        await site.pool.ensure_policy_on_all(policy(layout, 1))
        assert asyncio.get_running_loop().time() < 40  # one question is given up after 30 s
        assert site.pool.roots == ["http://server-0:80"]
        running = asyncio.create_task(site.pool.run())
        site.servers["http://server-1:80"].is_frozen = False
        await asyncio.sleep(60)
        assert site.pool.roots == ["http://server-0:80", "http://server-1:80"]
        running.cancel()
        await site.pool.aclose()

    run_virtually(scenario(), limit_s=600)


def test_servers_with_different_start_models_are_refused():
    async def scenario() -> None:
        site = Site(A, B)
        await site.pool.start()

        async def reload_weights() -> PolicyStatus:
            return PolicyStatus(version=PolicyVersion(0), digest="another model")

        site.servers[B].status = await reload_weights()
        site.servers[B].reload_weights = reload_weights
        with pytest.raises(ForeignPolicy, match="another start model"):
            await site.pool.ensure_policy_on_all(START)
        await site.pool.aclose()

    run_virtually(scenario(), limit_s=60)


def test_servers_behind_a_name_join_with_the_current_policy_and_leave_with_their_groups_lost(layout):
    async def scenario() -> None:
        a, b = f"{A}:80", f"{B}:80"
        site = Site(a, b, names=[["a"], ["a"], ["a", "b"], OSError("no answer"), ["b"]])
        async with started(site):
            await site.pool.ensure_policy(policy(layout, 1))
            assert site.pool.roots == [a]
            await asyncio.sleep(12)
            assert site.pool.roots == [a, b]
            assert site.servers[b].status.version == 1
            await asyncio.sleep(10)
            assert (site.pool.roots, site.lost) == ([b], [a])
            assert await site.pool.is_at_fault(a)
        assert "'inference.local' does not name it any more" in site.of(ServerDown)[0].reason

    run_virtually(scenario(), limit_s=60)


def test_a_name_behind_which_nobody_answers_ends_the_start():
    async def scenario() -> None:
        site = Site(A, names=[[]], ready_s=30.0)
        with pytest.raises(InferenceError, match=r"no server of client\.elastic\.hostname = 'inference\.local'"):
            await site.pool.start()

    run_virtually(scenario(), limit_s=60)


@simulated(A, B, limit_s=40_000)
async def test_a_server_that_never_comes_back_is_asked_for_ever(site: Site) -> None:
    crash = asyncio.create_task(site.servers[B].crash(1e9))
    await asyncio.sleep(36_000)
    assert not site.running.done()
    assert site.pool.roots == [A]
    crash.cancel()
