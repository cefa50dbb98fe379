"""Test the pool's decisions about its workers. Real ones are in tests/integration/test_env_workers.py."""

import asyncio
import socket
from pathlib import Path

import pytest

from support.virtual_time import run_virtually
from trivet.config.schema.inference import ClientConfig
from trivet.environments.workers.pool import PoolLimits, WorkerPool, _Environment, _Slot
from trivet.environments.workers.pulses import PulseMonitor
from trivet.environments.workers.restarts import RestartBudget
from trivet.environments.workers.worker_log import WorkerLog
from trivet.errors import EnvironmentLoadError, RolloutFailed
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


class LoadedWorker:
    """A worker that has loaded an environment."""

    num_pending = 0

    def __init__(self, info: EnvironmentInfo) -> None:
        self.info = info

    async def loaded(self, *, timeout_s: float) -> EnvironmentInfo:
        return self.info

    async def aclose(self, *, timeout_s: float) -> None:
        return None


def workers_of(infos: list[EnvironmentInfo], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each worker that is started be the next of these."""
    left = iter(infos)

    async def start(settings: HostSettings, **_: object) -> LoadedWorker:
        return LoadedWorker(next(left))

    monkeypatch.setattr("trivet.environments.workers.pool.WorkerClient.start", start)


def info_of(train: str = "t", held_out: str = "e", *, num: int = 3) -> EnvironmentInfo:
    return EnvironmentInfo(num_examples=num, num_eval_examples=2, train_digest=train, eval_digest=held_out)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (info_of("other"), "other examples to train on, 3 as well"),
        (info_of(num=4), "4 examples to train on instead of 3"),
        (info_of(held_out="other"), "other examples to evaluate on, 2 as well"),
    ],
)
@pytest.mark.parametrize("when", ["start", "restart"])
def test_a_worker_with_other_data_is_said_or_refused(
    other: EnvironmentInfo,
    said: str,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(*, is_strict: bool) -> None:
        infos = [info_of(), other] if when == "start" else [info_of(), info_of(), other]
        workers_of(infos, monkeypatch)
        settings = HostSettings(env_id="e", name="e", args={}, servers=ClientConfig().access, model_name="tiny")
        limits = PoolLimits(workers_per_env=2, strict_data=is_strict)
        pool = WorkerPool([settings], log_of=lambda name: tmp_path / name, limits=limits)
        await pool.start()
        if when == "restart":
            assert caplog.text == ""
            await pool._start_worker(pool._environments["e"].slots[0])

    asyncio.run(scenario(is_strict=False))
    assert f"has {said}: the same example is another one there" in caplog.text
    caplog.clear()
    with pytest.raises(EnvironmentLoadError, match=f"has {said}.*strict_data = true refuses that"):
        asyncio.run(scenario(is_strict=True))
