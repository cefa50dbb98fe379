"""Run environments that misbehave in real worker processes, over the real port. The model is a stand-in."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from support.environments.unruly import WAYS
from support.fake_inference import FakeInference
from support.groups import make_request
from support.http_fake import serve_fake
from support.processes import assert_all_gone, descendants_of, descendants_with, still_alive
from trivet.config.schema.environment import EnvConfig, EnvWorkersConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.settings import host_settings
from trivet.environments.workers.pool import WorkerPool, open_worker_pool, require_loadable
from trivet.errors import EnvironmentLoadError, RoleFailed, RolloutFailed, WorkerLost
from trivet.secret import SECRET_FILE
from trivet.wire.events import EnvRestart, Event
from trivet.wire.groups import GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments"

SECRETS = (SECRET_FILE, "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "JUDGE_KEY")

FAILING = {
    "raise": "ValueError",
    "nan": "RewardNotFinite",
    "none": "TypeError",
    "sys-exit": "SystemExit",
    "interrupt": "KeyboardInterrupt",
    "raise-in-setup": "LookupError",
    "exit-in-setup": "SystemExit",
}
"""Examples whose group fails at once, by the message. Others of `WAYS` end their worker, or cost nothing."""


@pytest.fixture(autouse=True)
def _environments_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))


@pytest.fixture
def url() -> Iterator[str]:
    with serve_fake(FakeInference()) as url:
        yield url


def settings(*, rollout_timeout_s: float = 60.0, **args: object) -> HostSettings:
    env = EnvConfig(id="unruly", args=args)
    return host_settings(env, model_name="m", client=ClientConfig(), hash_keys=["prompt"], rollout_timeout_s=rollout_timeout_s)


def request(way: str, url: str, *, group_id: int) -> GroupRequest:
    return make_request(group_id, env="unruly", example_id=WAYS.index(way), url=url)


def with_pool(
    directory: Path,
    scenario: Callable[[WorkerPool], Awaitable[None]],
    *,
    limits: EnvWorkersConfig,
    rollout_timeout_s: float = 60.0,
) -> None:
    before = descendants_of(os.getpid())

    async def run() -> None:
        def log_of(env: str) -> Path:
            return directory / f"{env}.log"

        async with open_worker_pool([settings(rollout_timeout_s=rollout_timeout_s)], log_of=log_of, limits=limits) as pool:
            keeping = asyncio.create_task(pool.run())
            try:
                await scenario(pool)
            finally:
                keeping.cancel()

    asyncio.run(run())
    assert not still_alive([each for each in descendants_of(os.getpid()) if each not in before])


def test_an_example_that_misbehaves_costs_its_own_group_and_is_counted_by_its_error(tmp_path: Path, url: str) -> None:
    async def scenario(pool: WorkerPool) -> None:
        [worker] = pool.status()
        assert pool.infos["unruly"].num_examples == len(WAYS) == len(set(pool.infos["unruly"].example_hashes))
        assert (await pool.example("unruly", split=Split.TRAIN, example_id=1)).prompt == [{"role": "user", "content": "raise"}]
        harmless = ["well", "fork", "fork-and-return", "big-text"]
        ways = [*FAILING, *harmless, *FAILING, *harmless]
        asked = [pool.run_group(request(way, url, group_id=group_id)) for group_id, way in enumerate(ways)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        for way, outcome in zip(ways, ended, strict=True):
            if way in FAILING:
                assert isinstance(outcome, RolloutFailed), way
                assert outcome.kind == FAILING[way]
            else:
                assert isinstance(outcome, list), (way, outcome)
                assert_is_group(outcome)
        assert [status.pid for status in pool.status()] == [worker.pid]
        values = pool.metrics()
        counts = {name: value for name, value in values.items() if name.startswith("failed_groups/")}
        assert counts == {f"failed_groups/unruly/{kind}": 4.0 if kind == "SystemExit" else 2.0 for kind in FAILING.values()}
        assert values["worker/unruly-0/restarts"] == values["worker/unruly-0/pending"] == 0
        assert values["worker_lag/unruly-0/max"] >= values["worker_lag/unruly-0/mean"] >= 0
        assert not any(name.startswith("failed_groups/") for name in pool.metrics())

    with_pool(tmp_path, scenario, limits=EnvWorkersConfig(max_env_worker_restarts=0), rollout_timeout_s=240.0)


def test_a_rollout_that_hangs_costs_its_group_after_its_time(tmp_path: Path, url: str) -> None:
    async def scenario(pool: WorkerPool) -> None:
        with pytest.raises(RolloutFailed) as failed:
            await pool.run_group(request("hang", url, group_id=0))
        assert failed.value.kind == "TimeoutError"
        assert pool.metrics()["failed_groups/unruly/TimeoutError"] == 1

    with_pool(tmp_path, scenario, limits=EnvWorkersConfig(max_env_worker_restarts=0), rollout_timeout_s=3.0)


def assert_is_group(rollouts: list[Rollout]) -> None:
    assert [rollout.index for rollout in rollouts] == [0, 1]
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    assert all(rollout.samples for rollout in rollouts)


@pytest.mark.core
def test_a_group_that_ends_its_worker_again_and_again_fails_and_takes_no_other_with_it(tmp_path: Path, url: str) -> None:
    events: list[Event] = []

    async def scenario(pool: WorkerPool) -> None:
        pool.report_to(events.append)
        asked = [request(way, url, group_id=group_id) for group_id, way in enumerate(["os-exit", "slow", "slow"])]
        guilty, *innocent = await asyncio.gather(*(until_done(pool, each) for each in asked), return_exceptions=True)
        assert isinstance(guilty, RolloutFailed)
        assert guilty.kind == "WorkerLost"
        assert "lost with its worker 3 times" in str(guilty)
        assert "ended with exit code 7" in str(guilty)
        for rollouts in innocent:
            assert isinstance(rollouts, list), rollouts
            assert_is_group(rollouts)
        assert pool.metrics()["failed_groups/unruly/WorkerLost"] == 1
        assert_is_group(await pool.run_group(request("well", url, group_id=3)))
        assert pool.status()[0].num_restarts == 3

    with_pool(tmp_path, scenario, limits=EnvWorkersConfig(max_env_worker_restarts=3))
    restarts = [event for event in events if isinstance(event, EnvRestart)]
    assert [restart.worker for restart in restarts] == ["unruly-0"] * 3
    assert len({restart.pid for restart in restarts}) == 3


async def until_done(pool: WorkerPool, asked: GroupRequest) -> list[Rollout]:
    """Run again whenever the worker is lost, as the dispatcher does."""
    while True:
        try:
            return await pool.run_group(asked)
        except WorkerLost:
            continue


def test_a_blocked_event_loop_is_seen_in_the_status_and_ended_with_its_traceback_in_the_log(tmp_path: Path, url: str) -> None:
    async def scenario(pool: WorkerPool) -> None:
        blocking = asyncio.create_task(pool.run_group(request("hold-gil", url, group_id=0)))
        while not pool.status()[0].blocked_for_s:
            assert not blocking.done()
            await asyncio.sleep(0.1)
        assert pool.status()[0].num_pending == 1
        with pytest.raises(WorkerLost, match="event loop was blocked"):
            await blocking
        assert_is_group(await pool.run_group(request("well", url, group_id=1)))

    with_pool(tmp_path, scenario, limits=EnvWorkersConfig(env_worker_timeout_s=10.0))
    assert "in behave" in (tmp_path / "unruly.log").read_text()


def test_a_worker_that_keeps_ending_ends_the_pool_with_its_last_lines(tmp_path: Path) -> None:
    async def run() -> None:
        limits = EnvWorkersConfig(max_env_worker_restarts=0)
        async with open_worker_pool([settings()], log_of=lambda env: tmp_path / f"{env}.log", limits=limits) as pool:
            os.kill(pool.status()[0].pid, signal.SIGKILL)
            await pool.run()

    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(run())
    [error] = failed.value.exceptions
    assert isinstance(error, RoleFailed)
    assert "unruly-0 was killed by SIGKILL" in str(error)
    assert "environment loaded env=unruly" in str(error)


_OWNER = """
import asyncio, sys
from pathlib import Path
from test_env_workers import settings, request
from trivet.config.schema.environment import EnvWorkersConfig
from trivet.environments.workers.pool import open_worker_pool

async def main(directory, url):
    limits = EnvWorkersConfig(workers_per_env=2)
    async with open_worker_pool([settings()], log_of=lambda env: directory / f"{env}.log", limits=limits) as pool:
        print("ready", flush=True)
        await asyncio.gather(*(pool.run_group(request("hang", url, group_id=index)) for index in range(4)))

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def test_workers_end_with_the_process_that_owns_them(tmp_path: Path, url: str) -> None:
    path = os.pathsep.join([str(ENVIRONMENTS), str(ENVIRONMENTS.parents[1]), str(Path(__file__).parent)])
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path), url], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        workers = descendants_of(owner.pid)
        assert len(descendants_with("trivet.environments.workers.main", owner.pid)) == 2
    finally:
        owner.kill()
        owner.communicate()
    assert_all_gone(workers)


_GARBLED = "def load_environment():\n    raise ValueError('\\x1b[2J \\udcff')\n"


def test_every_environment_that_cannot_be_loaded_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "garbled.py").write_text(_GARBLED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ENVIRONMENTS), str(tmp_path)]))
    expected = {"raises": "ValueError: no such file", "exits": "SystemExit: 9", "refuses": "colour", "garbled": "ValueError: "}
    args: dict[str, dict[str, object]] = {
        "raises": {"fails": "no such file"},
        "exits": {"fails": "exit"},
        "refuses": {"colour": 1},
    }
    wanted = [
        msgspec.structs.replace(settings(**args.get(name, {})), name=name, env_id="unruly" if name in args else name)
        for name in expected
    ]
    with pytest.raises(EnvironmentLoadError) as refused:
        require_loadable([*wanted, settings()], trained=["unruly"], timeout_s=120)
    problems = str(refused.value).split("\n- ")
    assert len(problems) == len(expected)
    for problem, (name, error) in zip(problems, expected.items(), strict=True):
        assert f"environment {name!r}: load_environment of " in problem
        assert error in problem
        assert problem.replace("\n", "").isprintable()
    assert refused.value.exit_code == 2


def test_an_environment_that_takes_too_long_to_load_is_ended_and_named() -> None:
    with pytest.raises(EnvironmentLoadError, match="'unruly' was not loaded after 5 s"):
        require_loadable([settings(takes_s=3600.0)], trained=["unruly"], timeout_s=5)
    assert not descendants_with("trivet.environments.workers.main", os.getpid())


def test_what_can_be_loaded_is_described() -> None:
    infos = require_loadable([settings()], trained=["unruly"], timeout_s=120)
    assert infos["unruly"].num_examples == len(WAYS)
    assert infos["unruly"].num_eval_examples == 0


@pytest.mark.parametrize("kept", [[], ["HF_TOKEN"]], ids=["none-kept", "one-kept"])
def test_environments_do_not_get_the_credentials_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: list[str]
) -> None:
    """The key of the servers they do get."""
    for name in (*SECRETS, "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "planted")
    seen = tmp_path / "seen.jsonl"
    env = EnvConfig(id="witness", args={"file": str(seen)}, env_vars=kept)
    settings = host_settings(env, model_name="m", client=ClientConfig(), hash_keys=["prompt"])
    require_loadable([settings], trained=["witness"], timeout_s=120)
    [line] = [json.loads(line) for line in seen.read_text().splitlines()]
    for names in line:
        assert {name for name in names if name in SECRETS} == set(kept)
        assert {"OPENAI_API_KEY", "PATH"} <= set(names)
