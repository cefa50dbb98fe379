"""The turn behind a sampled message is found by the message; what an environment serves is entered once and left once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

pytest.importorskip("verifiers.v1.interception", reason="needs verifiers 0.4")

from trivet.environments.apis.turns import Turn
from trivet.environments.apis.v1.play import ServedTurns, Serving
from trivet.errors import RolloutFailed


@dataclass
class Message:
    """Two with the same text are equal, and cannot be hashed, as verifiers' messages."""

    text: str


def turn(token: int) -> Turn:
    return Turn(prompt_ids=[1], completion_ids=[token], logprobs=[-0.5], versions=[])


def test_equal_messages_have_turns_of_their_own_and_a_copy_has_none() -> None:
    turns = ServedTurns()
    first, second = Message("yes"), Message("yes")
    turns.record("a", first, turn(7))
    turns.record("a", second, turn(8))
    assert turns.find("a", first) == turn(7)
    assert turns.find("a", second) == turn(8)
    assert turns.find("a", Message("yes")) is None
    assert turns.find("b", first) is None


def test_the_turns_of_a_trace_that_is_over_are_dropped() -> None:
    turns = ServedTurns()
    message = Message("yes")
    turns.record("a", message, turn(7))
    turns.record("b", message, turn(8))
    turns.forget("a")
    turns.forget("a")
    assert turns.find("a", message) is None
    assert turns.find("b", message) == turn(8)
    assert len(turns) == 1


class FakeEnvironment:
    def __init__(self, *, failures: int = 0) -> None:
        self.entered = 0
        self.left = 0
        self._failures = failures

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if self._failures:
            self._failures -= 1
            raise ConnectionError("no port")
        self.entered += 1
        try:
            yield
        finally:
            self.left += 1


def test_groups_that_start_at_the_same_time_share_one_start_and_the_end_leaves_it() -> None:
    async def scenario() -> None:
        env = FakeEnvironment()
        serving = Serving(env)
        await asyncio.gather(serving.start(), serving.start())
        await serving.start()
        assert (env.entered, env.left) == (1, 0)
        await serving.aclose()
        await serving.aclose()
        assert (env.entered, env.left) == (1, 1)

    asyncio.run(scenario())


def test_a_start_that_fails_costs_its_group_and_the_next_group_tries_again() -> None:
    async def scenario() -> None:
        env = FakeEnvironment(failures=1)
        serving = Serving(env)
        with pytest.raises(RolloutFailed, match="servers did not start: ConnectionError: no port") as failed:
            await serving.start()
        assert failed.value.kind == "ConnectionError"
        await serving.start()
        assert env.entered == 1
        await serving.aclose()

    asyncio.run(scenario())


def test_a_group_that_gives_up_does_not_end_the_start_for_others() -> None:
    async def scenario() -> None:
        env = FakeEnvironment()
        serving = Serving(env)
        impatient = asyncio.create_task(serving.start())
        await asyncio.sleep(0)
        impatient.cancel()
        await serving.start()
        assert env.entered == 1
        await serving.aclose()

    asyncio.run(scenario())
