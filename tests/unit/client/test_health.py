"""Test probes and admissions in virtual time. Whole pools are in test_server_pool.py."""

import asyncio
import random

import pytest

from support.simulated_run import START_DIGEST, SimulatedServer
from support.virtual_time import run_virtually
from trivet.client.health import ServerHealthMonitor
from trivet.client.server_set import Server, ServerSet, TargetPolicy
from trivet.errors import InferenceError
from trivet.wire.versions import PolicyVersion

A = "http://a"


def make_monitor() -> tuple[ServerHealthMonitor, ServerSet, Server, SimulatedServer]:
    clock = asyncio.get_running_loop().time
    servers = ServerSet(write_event=lambda event: None, clock=clock)
    servers.target = TargetPolicy(version=PolicyVersion(0), digest=START_DIGEST, directory=None)
    simulated = SimulatedServer(A, random.Random(0))
    server = servers.add(simulated)  # type: ignore[arg-type]  # acts as one
    server.status = simulated.status
    return ServerHealthMonitor(servers, clock=clock), servers, server, simulated


def test_a_server_is_admitted_asked_and_admitted_again_after_a_crash():
    async def scenario() -> None:
        monitor, servers, server, simulated = make_monitor()
        async with asyncio.TaskGroup() as tasks:
            monitor.watch(tasks, server)
            await asyncio.sleep(1)
            assert servers.admitted == [server]
            crash = asyncio.create_task(simulated.crash(20.0))
            await asyncio.sleep(6)
            assert servers.admitted == []
            await crash
            await asyncio.sleep(31)
            assert servers.admitted == [server]
            monitor.unwatch(A)

    run_virtually(scenario(), limit_s=120)


def test_a_server_that_was_removed_is_at_fault():
    async def scenario() -> None:
        monitor, servers, server, _ = make_monitor()
        servers.admit(server)
        assert not await monitor.is_at_fault(A)
        servers.remove(A)
        assert await monitor.is_at_fault(A)

    run_virtually(scenario(), limit_s=60)


def test_a_time_without_servers_ends_in_an_error_that_says_what_each_answered():
    async def scenario() -> None:
        monitor, servers, server, _ = make_monitor()
        servers.admit(server)
        servers.mark_unhealthy(server, "it crashed")
        with pytest.raises(InferenceError, match=r"no inference server was left for 1\d s .*http://a: it crashed"):
            await monitor.require_servers(max_empty_s=10.0)

    run_virtually(scenario(), limit_s=60)
