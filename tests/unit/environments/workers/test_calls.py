"""Answers are matched with the calls that wait for them, and the shape and numbers of rollouts are checked before they are used."""

import asyncio
import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from support.groups import make_request
from trivet.environments.workers.calls import PendingCalls, find_fault
from trivet.errors import MessageRefused, RolloutFailed, WorkerLost
from trivet.wire.groups import Example, Split
from trivet.wire.rollouts import Rollout, Sample, TurnRun
from trivet.wire.versions import PolicyVersion, VersionRun
from trivet.wire.workers import AskExample, CallFailed, CallOrder, Cancel, ExampleFound, GroupDone


def order(calls: PendingCalls, example_id: int) -> AskExample:
    return AskExample(call_id=calls.next_id(), env="toy", split=Split.TRAIN, example_id=example_id)


def answer(call_id: int) -> ExampleFound:
    return ExampleFound(call_id=call_id, example=Example(prompt=[{"content": str(call_id)}]))


def test_every_caller_gets_the_answer_of_its_own_call_in_whatever_order_they_come():
    async def scenario() -> None:
        sent: list[CallOrder] = []
        calls = PendingCalls(sent.append)
        first, second, third = (asyncio.create_task(calls.call(order(calls, index), ExampleFound)) for index in (7, 8, 9))
        await asyncio.sleep(0)
        assert [message.call_id for message in sent] == calls.ids == [0, 1, 2]
        calls.resolve(answer(1))
        calls.resolve(CallFailed(call_id=0, kind="ValueError", message="no"))
        assert await second == answer(1)
        with pytest.raises(RolloutFailed, match="no") as failed:
            await first
        assert failed.value.kind == "ValueError"
        calls.resolve(CallFailed(call_id=2, kind="WorkerLost", message="was killed by SIGKILL", is_lost=True))
        with pytest.raises(WorkerLost, match="SIGKILL"):
            await third
        assert calls.ids == []

    asyncio.run(scenario())


def test_a_cancelled_caller_cancels_its_call_and_its_late_answer_is_dropped():
    async def scenario() -> None:
        sent: list[CallOrder] = []
        calls = PendingCalls(sent.append)
        calling = asyncio.create_task(calls.call(order(calls, 7), ExampleFound))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert sent[-1] == Cancel(call_id=0)
        calls.resolve(answer(0))
        with pytest.raises(MessageRefused, match="call 1, which was never made"):
            calls.resolve(answer(1))

    asyncio.run(scenario())


def test_an_answer_to_something_else_is_refused():
    async def scenario() -> None:
        calls = PendingCalls(lambda _: None)
        calling = asyncio.create_task(calls.call(order(calls, 7), ExampleFound))
        await asyncio.sleep(0)
        with pytest.raises(MessageRefused, match="GroupDone in answer to call 0, which needs a ExampleFound"):
            calls.resolve(GroupDone(call_id=0, rollouts=[]))
        calling.cancel()

    asyncio.run(scenario())


def test_the_end_of_the_worker_fails_calls_in_flight_and_later_ones():
    async def scenario() -> None:
        calls = PendingCalls(lambda _: None)
        calling = asyncio.create_task(calls.call(order(calls, 7), ExampleFound))
        await asyncio.sleep(0)
        calls.fail_all("the worker ended with exit code 7")
        for lost in (calling, calls.call(order(calls, 8), ExampleFound)):
            with pytest.raises(WorkerLost, match="ended with exit code 7"):
                await lost

    asyncio.run(scenario())


SAMPLE = Sample(
    token_ids_T=np.array([5, 6, 7], dtype=np.int32),
    loss_mask_T=np.array([False, True, True]),
    logprobs_T=np.array([0, -0.5, -1.5], dtype=np.float32),
    versions=[VersionRun(PolicyVersion(3), 2)],
    temperature=1.0,
)


def fault_of(change: Callable[[list[Rollout]], object]) -> str | None:
    rollouts = [Rollout(index=index, reward=1.0, samples=[SAMPLE]) for index in range(2)]
    change(rollouts)
    return find_fault(rollouts, make_request(7, env="toy"))


def replace_sample(**fields: object) -> Callable[[list[Rollout]], object]:
    return lambda rollouts: rollouts[1].samples.append(msgspec.structs.replace(SAMPLE, **fields))


def replace_rollout(**fields: object) -> Callable[[list[Rollout]], object]:
    return lambda rollouts: rollouts.append(msgspec.structs.replace(rollouts.pop(), **fields))


def test_a_well_formed_answer_has_no_fault():
    assert fault_of(lambda rollouts: None) is None
    assert fault_of(replace_rollout(samples=[])) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        pytest.param(lambda rollouts: rollouts.pop(), "has 1 rollouts, where 2 in order were asked for", id="too few"),
        pytest.param(lambda rollouts: rollouts.reverse(), "in order", id="out of order"),
        pytest.param(replace_rollout(reward=float("nan")), "with reward = nan", id="no reward"),
        pytest.param(replace_rollout(scores={"speed": float("inf")}), "with speed = inf", id="no score"),
        pytest.param(
            replace_sample(logprobs_T=np.zeros(2, dtype=np.float32)), r"logprobs_T has the shape \(2,\)", id="short logprobs"
        ),
        pytest.param(replace_sample(token_ids_T=np.arange(3, dtype=np.int64)), "dtype int64", id="other dtype"),
        pytest.param(replace_sample(token_ids_T=np.zeros((3, 1), dtype=np.int32)), r"shape \(3, 1\)", id="a table"),
        pytest.param(
            replace_sample(logprobs_T=np.array([0, np.nan, -1], dtype=np.float32)), "that are no numbers", id="no logprob"
        ),
        pytest.param(replace_rollout(turn_rewards=[1.0, 2.0]), "with 1 turns and 2 turn rewards", id="turn rewards"),
        pytest.param(replace_rollout(turn_rewards=[float("nan")]), "with a turn reward of nan", id="no turn reward"),
        pytest.param(replace_sample(turns=[TurnRun(0, 1)]), "2 sampled tokens and turns for 1", id="few turns"),
        pytest.param(replace_sample(turns=[TurnRun(1 << 40, 2)]), "2 sampled tokens and turns for 0", id="no turn"),
        pytest.param(
            replace_sample(versions=[VersionRun(PolicyVersion(3), 1)]), "tokens and policy versions for 1", id="few versions"
        ),
    ],
)
def test_a_fault_is_named(change: Callable[[list[Rollout]], object], fault: str):
    assert re.search(fault, fault_of(change) or "")
