"""What an environment serves is entered once, left once, and tried again where it did not start."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from trivet.environments.apis.v1.play import Serving
from trivet.errors import RolloutFailed


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
