"""Workers that misbehave in every way, as real processes: the pool names each, and ends it or refuses what it says."""

import asyncio
import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from trivet.config.schema.environment import EnvWorkersConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.workers.pool import open_worker_pool
from trivet.errors import EnvironmentLoadError, RolloutFailed, WorkerLost
from trivet.wire.events import EnvRestart, Event
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId
from trivet.wire.workers import PROTOCOL, HostSettings

PROGRAM = Path(__file__).parents[1] / "support" / "hostile_worker.py"

REFUSED = {
    "short-logprobs": "logprobs_T has the shape (2,)",
    "nan-reward": "with reward = nan",
    "too-many": "has 3 rollouts, where 2 in order were asked for",
}
"""The group fails, and the worker stays: what it says cannot be true."""

ENDED = {
    "unknown-call": "an answer to call 1000, which was never made",
    "prompt-for-group": "a ExampleFound in answer to call 0, which needs a GroupDone",
    "garbage": "are not a WorkerAnswer",
    "killed": "was killed by SIGKILL",
    "hangs": "event loop was blocked",
    "no-pulse": "event loop was blocked",
    "takes-memory": "and max_worker_memory is 0.25 GiB",
    "child-takes-memory": "and max_worker_memory is 0.25 GiB",
}
"""The worker is ended and started again; its group may run again."""

HARMLESS = ("well", "answers-twice", "leaves-files", "opens-files", "prints")
"""The group is as good as any."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostSettings:
    """An environment whose interpreter is the hostile program."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return HostSettings(
        env_id="toy",
        name="toy",
        args={},
        servers=ClientConfig().access,
        model_name="m",
        python=str(python),
        rollout_timeout_s=60.0,
    )


def play(way: str, settings: HostSettings, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, list[Event]]:
    """Run one group on a worker of that kind; return what became of it and the events."""
    monkeypatch.setenv("HOSTILE_WAY", way)
    events: list[Event] = []
    blocked_timeout_s = 60.0 if way == "child-takes-memory" else 4.0  # children are measured every 10 s
    limits = EnvWorkersConfig(
        max_env_worker_restarts=-1, env_worker_timeout_s=blocked_timeout_s, env_start_timeout_s=60.0, max_worker_memory=0.25
    )
    request = GroupRequest(
        group_id=GroupId(7), env="toy", example_id=0, num_rollouts=2, base_url="", sampling=SamplingArguments(temperature=1.0)
    )

    async def run() -> object:
        async with open_worker_pool([settings], log_of=lambda env: directory / f"{env}.log", limits=limits) as pool:
            pool.report_to(events.append)
            keeping = asyncio.create_task(pool.run())
            try:
                [outcome] = await asyncio.gather(pool.run_group(request), return_exceptions=True)
                while isinstance(outcome, WorkerLost) and not any(isinstance(event, EnvRestart) for event in events):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            finally:
                keeping.cancel()
            return outcome

    return asyncio.run(run()), events


@pytest.mark.parametrize("way", REFUSED)
def test_an_answer_that_cannot_be_true_is_refused_and_named(
    way: str, settings: HostSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, events = play(way, settings, tmp_path, monkeypatch)
    assert isinstance(outcome, RolloutFailed)
    assert outcome.kind == "AnswerRefused"
    assert "the worker of environment 'toy' (pid" in str(outcome)
    assert REFUSED[way] in str(outcome)
    assert not any(isinstance(event, EnvRestart) for event in events)


@pytest.mark.parametrize("way", ENDED)
def test_a_worker_that_harms_the_pool_is_ended_named_and_started_again(
    way: str, settings: HostSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, events = play(way, settings, tmp_path, monkeypatch)
    assert isinstance(outcome, WorkerLost), outcome
    assert ENDED[way] in str(outcome)
    [restart, *_] = [event for event in events if isinstance(event, EnvRestart)]
    assert restart.worker == "toy-0"
    assert ENDED[way] in restart.cause
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("way", HARMLESS)
def test_what_harms_nobody_costs_nothing(
    way: str, settings: HostSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, _ = play(way, settings, tmp_path, monkeypatch)
    assert isinstance(outcome, list), outcome
    assert all(isinstance(rollout, Rollout) for rollout in outcome)
    assert not list((tmp_path / "tmp").iterdir())
    log = tmp_path / "toy.log"
    if way == "opens-files":
        assert 16_000 < int(log.read_text().split("opened")[1].split()[0]) < 16_384
    assert log.stat().st_size <= 66 << 20


def test_a_worker_of_another_protocol_is_refused_with_the_command_that_updates_it(
    settings: HostSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        EnvironmentLoadError, match=rf"trivet-worker 9\.9, which speaks version {PROTOCOL + 1} .*uv run trivet env install toy"
    ):
        play("other-protocol", settings, tmp_path, monkeypatch)


def test_what_a_pool_that_was_killed_left_is_removed_by_the_next(
    settings: HostSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "tmp" / "trivet-worker-left"
    left.mkdir()
    (left / "file").touch()
    play("well", settings, tmp_path, monkeypatch)
    assert not left.exists()
    assert os.listdir(tmp_path / "tmp") == []  # noqa: PTH208
