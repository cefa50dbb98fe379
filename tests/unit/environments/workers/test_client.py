"""Test a worker whose process, channel or environment ends. Real ones are in tests/integration/test_env_workers.py."""

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.stand_in_process import StandInProcess
from support.virtual_time import run_virtually
from trivet.config.schema.inference import ClientConfig
from trivet.environments.workers.channel import Channel
from trivet.environments.workers.client import PulseMonitor, WorkerClient
from trivet.environments.workers.limits import WorkerLog
from trivet.errors import EnvironmentLoadError, WorkerLost
from trivet.process.signals import STACKS_SIGNAL, STACKS_WITHIN_S
from trivet.wire.groups import EnvironmentInfo, Example, Split
from trivet.wire.workers import (
    PROTOCOL,
    AskExample,
    EnvironmentLoaded,
    EnvironmentLoadFailed,
    ExampleFound,
    HostSettings,
    Pulse,
    WorkerAnswer,
    WorkerHello,
    WorkerOrder,
)

SETTINGS = HostSettings(env_id="toy", name="toy", args={}, servers=ClientConfig().access, model_name="tiny")
HELLO = WorkerHello(protocol=PROTOCOL, worker="trivet-worker 0.1.0", python="3.12.1", verifiers="0.3.1")

Scenario = Callable[[WorkerClient, Channel, StandInProcess], Awaitable[None]]


def play(scenario: Scenario, tmp_path: Path) -> None:
    """Run `scenario` with a client, the worker's end of its channel and its process."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        stand_in, log = StandInProcess(), tmp_path / "log"
        log.write_text("earlier\n")
        worker_end = await Channel.open(theirs)
        client = WorkerClient(
            stand_in,  # type: ignore[arg-type]  # acts as one
            await Channel.open(ours),
            settings=SETTINGS,
            log=WorkerLog(log),
            log_offset=8,
            clock=asyncio.get_running_loop().time,
            end_session=stand_in.end_session,
        )
        worker_end.post(HELLO)
        await scenario(client, worker_end, stand_in)
        await worker_end.aclose()
        await client.aclose(timeout_s=0.0)

    run_virtually(run(), limit_s=100)


def test_a_worker_loads_answers_and_lets_calls_fail_when_it_exits(tmp_path: Path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        worker_end.post(WorkerAnswer(body=EnvironmentLoaded(info=EnvironmentInfo(num_examples=3))))
        assert (await client.wait_loaded(timeout_s=1.0)).num_examples == 3
        first, second = (asyncio.create_task(client.example(split=Split.TRAIN, example_id=index)) for index in (0, 1))
        order = await worker_end.receive(WorkerOrder)
        assert order is not None
        assert isinstance(order.body, AskExample)
        worker_end.post(WorkerAnswer(body=ExampleFound(call_id=order.body.call_id, example=Example(prompt=[{"content": "x"}]))))
        assert (await first).prompt == [{"content": "x"}]
        assert client.num_pending == 1
        stand_in.exit(7)
        await worker_end.aclose()
        with pytest.raises(WorkerLost, match=r"environment 'toy' \(pid 4242\) ended with exit code 7"):
            await second
        assert await client.ended() == "ended with exit code 7"
        assert not client.status(num_restarts=2).is_alive

    play(scenario, tmp_path)


def test_a_process_that_outlives_its_channel_is_ended(tmp_path: Path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        await worker_end.aclose()
        assert await client.ended() == "was killed by SIGKILL"
        assert stand_in.history == [(10.0, "killed")]
        with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
            await client.wait_loaded(timeout_s=1.0)

    play(scenario, tmp_path)


def test_the_pool_hears_of_the_end_before_a_caller_can_retry(tmp_path: Path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        heard: list[str] = []

        async def call() -> None:
            with pytest.raises(WorkerLost):
                await client.example(split=Split.TRAIN, example_id=0)
            heard.append("caller")

        async def keep_alive() -> None:
            await client.ended()
            heard.append("pool")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(call())
            tasks.create_task(keep_alive())
            await asyncio.sleep(0.1)
            stand_in.exit(7)
            await worker_end.aclose()
        assert heard == ["pool", "caller"]

    play(scenario, tmp_path)


def test_an_environment_that_cannot_be_loaded_is_reported(tmp_path: Path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        worker_end.post(WorkerAnswer(body=EnvironmentLoadFailed(message="no such module")))
        with pytest.raises(EnvironmentLoadError, match="no such module"):
            await client.wait_loaded(timeout_s=1.0)

    play(scenario, tmp_path)


@pytest.mark.parametrize(
    "message",
    [
        WorkerOrder(body=AskExample(call_id=0, env="toy", split=Split.TRAIN, example_id=0)),
        WorkerAnswer(body=Pulse(loop_age_s=math.nan, num_generating=0, num_scoring=0, scoring_for_s=0.0, lags_s=[])),
        WorkerAnswer(body=Pulse(loop_age_s=0.0, num_generating=0, num_scoring=0, scoring_for_s=0.0, lags_s=[math.inf])),
    ],
    ids=["an order", "no number", "infinite lag"],
)
def test_a_worker_that_sends_what_is_no_answer_is_ended(message: WorkerOrder | WorkerAnswer, tmp_path: Path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        worker_end.post(message)
        assert (await client.ended()).startswith("sent what is not an answer: ")

    play(scenario, tmp_path)


def test_a_blocked_worker_first_has_time_to_write_its_stacks(tmp_path: Path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        client.end("was ended because it was blocked", with_stacks=True)
        client.end("was ended because it is still blocked", with_stacks=True)
        assert await client.ended() == "was ended because it is still blocked"
        assert stand_in.history[:2] == [(0.0, STACKS_SIGNAL), (STACKS_WITHIN_S, "killed")]

    play(scenario, tmp_path)


def test_only_the_last_lines_of_its_own_output_are_quoted(tmp_path: Path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        assert client.last_lines() == ""
        with (tmp_path / "log").open("a") as file:
            file.write("".join(f"line {number}\n" for number in range(30)))
        assert client.last_lines().splitlines()[1:] == [f"  line {number}" for number in range(10, 30)]
        stand_in.exit(0)

    play(scenario, tmp_path)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pulse(
    *, loop_age_s: float = 0.0, num_scoring: int = 0, scoring_for_s: float = 0.0, lags_s: tuple[float, ...] = ()
) -> Pulse:
    return Pulse(
        loop_age_s=loop_age_s, num_generating=4, num_scoring=num_scoring, scoring_for_s=scoring_for_s, lags_s=list(lags_s)
    )


def test_a_worker_counts_as_blocked_after_three_seconds_of_silence_once_it_has_loaded():
    monitor = PulseMonitor(clock := Clock())
    clock.now += 3600
    assert monitor.blocked_for_s() == 0.0
    monitor.expect()
    clock.now += 20.0
    assert monitor.blocked_for_s() == 20.0
    monitor.receive(pulse(loop_age_s=0.5))
    clock.now += 3.0
    assert monitor.blocked_for_s() == 0.0
    clock.now += 1.0
    assert monitor.blocked_for_s() == 4.5
    monitor.receive(pulse())
    assert monitor.blocked_for_s() == 0.0


def test_a_worker_whose_loop_does_not_turn_is_blocked_though_it_sends_pulses():
    monitor = PulseMonitor(clock := Clock())
    monitor.receive(pulse(loop_age_s=20.0))
    clock.now += 1.0
    assert monitor.blocked_for_s() == 21.0


def test_a_pool_that_did_not_run_counts_the_silence_anew():
    monitor = PulseMonitor(clock := Clock())
    monitor.receive(pulse())
    clock.now += 600
    monitor.expect()
    assert monitor.blocked_for_s() == 0.0


def test_the_age_of_scoring_goes_on_between_pulses_and_lags_are_taken_once():
    monitor = PulseMonitor(clock := Clock())
    monitor.receive(pulse(num_scoring=2, scoring_for_s=7.0, lags_s=(0.1,)))
    clock.now += 2.0
    assert monitor.scoring_for_s() == 9.0
    monitor.receive(pulse(lags_s=(0.2, 0.3)))
    assert monitor.scoring_for_s() == 0.0
    assert (monitor.take_lags(), monitor.take_lags()) == ([0.1, 0.2, 0.3], [])
