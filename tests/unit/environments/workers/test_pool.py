"""Test the pool's decisions about its workers. Real ones are in tests/integration/test_env_workers.py."""

import asyncio
import socket
from pathlib import Path

import pytest

from support.virtual_time import run_virtually
from trivet.config.sections.client import ClientConfig
from trivet.environments.workers.pool import PoolLimits, WorkerPool, _Environment, _Slot
from trivet.environments.workers.pulses import PulseMonitor
from trivet.environments.workers.restarts import RestartBudget
from trivet.environments.workers.worker_log import WorkerLog
from trivet.errors import RolloutFailed
from trivet.wire.groups import EnvironmentInfo, GroupRequest, SamplingArguments
from trivet.wire.rollouts import GroupId, Rollout
from trivet.wire.workers import HostSettings


class DeafWorker:
    """A worker that ignores every message, like an environment that swallows its cancellation."""

    num_pending = 0

    def __init__(self, pulses: PulseMonitor) -> None:
        self.pulses = pulses

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_group_that_its_worker_does_not_end_in_time_fails():
    async def scenario() -> None:
        settings = HostSettings(
            env_id="deaf", name="deaf", args={}, servers=ClientConfig().access, model_name="tiny", rollout_timeout_s=60.0
        )
        pool = WorkerPool([settings], log_of=Path, limits=PoolLimits())
        slot = _Slot(name="deaf-0", settings=settings, budget=RestartBudget(limit=5))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pulses = PulseMonitor(ours, clock=asyncio.get_running_loop().time, on_fault=print)
        slot.worker = DeafWorker(pulses)  # type: ignore[assignment]  # acts as one
        pool._environments = {"deaf": _Environment(info=EnvironmentInfo(num_examples=1), slots=[slot], log=WorkerLog(Path()))}
        request = GroupRequest(
            group_id=GroupId(7),
            env="deaf",
            example_id=0,
            num_rollouts=2,
            base_url="",
            sampling=SamplingArguments(temperature=1.0),
        )
        with pytest.raises(RolloutFailed, match=r"group 7 .* did not end when its time was over") as caught:
            await pool.run_group(request)
        assert (caught.value.kind, asyncio.get_running_loop().time()) == ("TimeoutError", pytest.approx(90.0))
        assert pool.metrics()["failed_groups/deaf/TimeoutError"] == 1
        pulses.close()
        theirs.close()

    run_virtually(scenario(), limit_s=200)
