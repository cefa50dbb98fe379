import asyncio

import pytest

from trivet.environments.workers.calls import PendingCalls
from trivet.errors import RolloutFailed, WorkerLost
from trivet.wire.groups import Split
from trivet.wire.workers import AskPrompt, CallFailed, Cancel, PromptFound, WorkerOrder


def ask(example_id: int):
    return lambda call_id: AskPrompt(call_id=call_id, split=Split.TRAIN, example_id=example_id)


def answer(call_id: int) -> PromptFound:
    return PromptFound(call_id=call_id, messages=[{"content": str(call_id)}])


def test_every_caller_gets_the_answer_of_its_own_call_in_whatever_order_they_come():
    async def scenario() -> None:
        sent: list[WorkerOrder] = []
        calls = PendingCalls(sent.append)
        first, second = (asyncio.create_task(calls.call(ask(example_id), PromptFound)) for example_id in (7, 8))
        await asyncio.sleep(0)
        assert [order.body for order in sent] == [ask(7)(0), ask(8)(1)]
        assert len(calls) == 2
        calls.resolve(answer(1))
        calls.resolve(CallFailed(call_id=0, kind="ValueError", message="no"))
        assert await second == answer(1)
        with pytest.raises(RolloutFailed, match="no") as failed:
            await first
        assert failed.value.kind == "ValueError"
        assert len(calls) == 0

    asyncio.run(scenario())


def test_a_cancelled_caller_cancels_its_call_and_its_late_answer_is_dropped():
    async def scenario() -> None:
        sent: list[WorkerOrder] = []
        calls = PendingCalls(sent.append)
        calling = asyncio.create_task(calls.call(ask(7), PromptFound))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert sent[-1].body == Cancel(call_id=0)
        calls.resolve(answer(0))
        assert len(calls) == 0

    asyncio.run(scenario())


def test_the_end_of_the_worker_fails_calls_in_flight_and_later_ones():
    async def scenario() -> None:
        calls = PendingCalls(lambda order: None)
        calling = asyncio.create_task(calls.call(ask(7), PromptFound))
        await asyncio.sleep(0)
        calls.fail_all("the worker ended with exit code 7")
        for lost in (calling, calls.call(ask(8), PromptFound)):
            with pytest.raises(WorkerLost, match="ended with exit code 7"):
                await lost

    asyncio.run(scenario())
