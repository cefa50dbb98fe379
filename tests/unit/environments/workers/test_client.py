"""Test a worker whose process, channel or environment ends. Real ones are in tests/integration/test_env_workers.py."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from support.stand_in_process import StandInProcess
from support.virtual_time import run_virtually
from trivet.config.schema.inference import ClientConfig
from trivet.environments.workers.channel import Channel
from trivet.environments.workers.client import WorkerClient
from trivet.environments.workers.process import WorkerProcess
from trivet.environments.workers.pulses import PulseMonitor
from trivet.environments.workers.worker_log import WorkerLog
from trivet.errors import EnvironmentLoadError, WorkerLost
from trivet.wire.groups import EnvironmentInfo, Split
from trivet.wire.workers import (
    PROTOCOL,
    AskPrompt,
    EnvironmentLoaded,
    EnvironmentLoadFailed,
    HostSettings,
    PromptFound,
    WorkerAnswer,
    WorkerHello,
    WorkerOrder,
)

SETTINGS = HostSettings(env_id="toy", name="toy", args={}, servers=ClientConfig().access, model_name="tiny")
HELLO = WorkerHello(protocol=PROTOCOL, worker="trivet-worker 0.1.0", python="3.12.1", verifiers="0.3.1")


def play(scenario: Callable[[WorkerClient, Channel, StandInProcess], Awaitable[None]], tmp_path) -> None:
    """Run `scenario` with a client, the worker's end of its channel and its process."""

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        ours, theirs = socket.socketpair()
        pulses, their_pulses = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stand_in, log = StandInProcess(), tmp_path / "log"
        log.touch()
        process = WorkerProcess(stand_in, log=WorkerLog(log), end_session=stand_in.end_session)  # type: ignore[arg-type]  # acts as one
        worker_end = await Channel.open(theirs)
        monitor = PulseMonitor(pulses, clock=clock, on_fault=process.end)
        client = WorkerClient(process, await Channel.open(ours), monitor, settings=SETTINGS)
        with their_pulses:
            await worker_end.send(HELLO)
            await scenario(client, worker_end, stand_in)
        await worker_end.aclose()
        await client.aclose(timeout_s=0.0)

    run_virtually(run(), limit_s=100)


def test_a_worker_loads_answers_and_lets_calls_fail_when_it_exits(tmp_path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        await worker_end.send(WorkerAnswer(body=EnvironmentLoaded(info=EnvironmentInfo(num_examples=3))))
        assert (await client.loaded(timeout_s=1.0)).num_examples == 3
        first, second = (asyncio.create_task(client.prompt(split=Split.TRAIN, example_id=index)) for index in (0, 1))
        order = await worker_end.receive(WorkerOrder)
        assert order is not None
        assert isinstance(order.body, AskPrompt)
        await worker_end.send(WorkerAnswer(body=PromptFound(call_id=order.body.call_id, messages=[{"content": "x"}])))
        assert await first == [{"content": "x"}]
        assert client.num_pending == 1
        stand_in.exit(7)
        await worker_end.aclose()
        with pytest.raises(WorkerLost, match=r"environment 'toy' \(pid 4242\) ended with exit code 7"):
            await second
        assert await client.ended() == "ended with exit code 7"
        assert not client.status(num_restarts=2).is_alive

    play(scenario, tmp_path)


def test_a_process_that_outlives_its_channel_is_ended(tmp_path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        await worker_end.aclose()
        assert await client.ended() == "was killed by SIGKILL"
        assert stand_in.history == [(10.0, "killed")]
        with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
            await client.loaded(timeout_s=1.0)

    play(scenario, tmp_path)


def test_the_pool_hears_of_the_end_before_a_caller_can_retry(tmp_path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        heard: list[str] = []

        async def call() -> None:
            with pytest.raises(WorkerLost):
                await client.prompt(split=Split.TRAIN, example_id=0)
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


def test_an_environment_that_cannot_be_loaded_is_reported(tmp_path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        await worker_end.send(WorkerAnswer(body=EnvironmentLoadFailed(message="no such module")))
        with pytest.raises(EnvironmentLoadError, match="no such module"):
            await client.loaded(timeout_s=1.0)

    play(scenario, tmp_path)


def test_a_worker_that_sends_what_is_no_answer_is_ended(tmp_path):
    async def scenario(client: WorkerClient, worker_end: Channel, stand_in: StandInProcess) -> None:
        await worker_end.send(WorkerOrder(body=AskPrompt(call_id=0, split=Split.TRAIN, example_id=0)))
        assert (await client.ended()).startswith("sent what is not an answer: ")

    play(scenario, tmp_path)
