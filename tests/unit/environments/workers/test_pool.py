"""Test the pool's decisions about its workers. Real ones are in tests/integration/test_env_workers.py."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from support.groups import make_request
from support.virtual_time import run_virtually
from trivet.config.schema.environment import EnvWorkersConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.workers.client import PulseMonitor
from trivet.environments.workers.pool import RestartBudget, WorkerPool
from trivet.errors import EnvironmentLoadError, RolloutFailed
from trivet.wire.groups import EnvironmentInfo, GroupRequest
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings

SETTINGS = HostSettings(env_id="e", name="e", args={}, servers=ClientConfig().access, model_name="tiny", rollout_timeout_s=60.0)


class LoadedWorker:
    """A worker that has loaded an environment, and never ends a group."""

    num_pending = 0

    def __init__(self, info: EnvironmentInfo) -> None:
        self.info = info
        self.pulses = PulseMonitor(lambda: 0.0)

    async def wait_loaded(self, *, timeout_s: float) -> EnvironmentInfo:
        return self.info

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        await asyncio.Event().wait()
        raise AssertionError


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
        limits = EnvWorkersConfig(workers_per_env=2, strict_data=is_strict)
        pool = WorkerPool([SETTINGS], log_of=lambda name: tmp_path / name, limits=limits)
        await pool.start()
        if when == "restart":
            assert caplog.text == ""
            await pool._start_worker(pool._environments["e"].slots[0])

    asyncio.run(scenario(is_strict=False))
    assert f"has {said}: the same example is another one there" in caplog.text
    caplog.clear()
    with pytest.raises(EnvironmentLoadError, match=f"has {said}.*strict_data = true refuses that"):
        asyncio.run(scenario(is_strict=True))


def test_every_environment_that_cannot_be_loaded_is_named_without_secrets_and_with_the_variable_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Failing(LoadedWorker):
        def __init__(self, settings: HostSettings) -> None:
            super().__init__(info_of())
            self.settings = settings

        async def wait_loaded(self, *, timeout_s: float) -> EnvironmentInfo:
            raise EnvironmentLoadError(f"{self.settings.name} wants JUDGE_TOKEN, not {self.settings.args['api_key']}")

    async def start(settings: HostSettings, **_: object) -> Failing:
        return Failing(settings)

    monkeypatch.setattr("trivet.environments.workers.pool.WorkerClient.start", start)
    monkeypatch.setenv("JUDGE_TOKEN", "x")
    envs = [msgspec.structs.replace(SETTINGS, name=name, args={"api_key": "planted"}) for name in ("first", "second")]
    pool = WorkerPool(envs, log_of=lambda name: tmp_path / name, limits=EnvWorkersConfig(workers_per_env=2))
    with pytest.raises(EnvironmentLoadError) as refused:
        asyncio.run(pool.start())
    first, second = str(refused.value).split("\n- ")
    assert first.startswith("first wants JUDGE_TOKEN")
    assert second.startswith("second wants JUDGE_TOKEN")
    assert 'add env_vars = ["JUDGE_TOKEN"] to the environment' in first
    assert "planted" not in str(refused.value)


def test_a_group_that_its_worker_does_not_end_in_time_fails(monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        workers_of([info_of()], monkeypatch)
        pool = WorkerPool([SETTINGS], log_of=Path, limits=EnvWorkersConfig())
        await pool.start()
        with pytest.raises(RolloutFailed, match=r"group 7 .* did not end when its time was over") as caught:
            await pool.run_group(make_request(7, env="e"))
        assert (caught.value.kind, asyncio.get_running_loop().time()) == ("TimeoutError", pytest.approx(90.0))
        assert pool.metrics()["failed_groups/e/TimeoutError"] == 1

    run_virtually(scenario(), limit_s=200)


def test_the_wait_before_a_restart_doubles_up_to_a_limit():
    budget = RestartBudget(limit=-1)
    assert [budget.next_delay_s() for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_there_are_as_many_consecutive_restarts_as_the_limit_says():
    budget = RestartBudget(limit=2)
    assert [budget.next_delay_s() for _ in range(3)] == [0.5, 1.0, None]
    budget.num_consecutive = 0
    assert (budget.next_delay_s(), budget.num_restarts) == (0.5, 3)
    assert RestartBudget(limit=0).next_delay_s() is None
