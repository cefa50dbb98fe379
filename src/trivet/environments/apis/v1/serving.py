"""Keeps up what a v1 environment serves, from its first group to its end: interception endpoints and shared tool servers."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from trivet.environments.apis.messages import describe
from trivet.errors import RolloutFailed


class ServedEnvironment(Protocol):
    """The part of an environment that is used here. Adapter: `verifiers.v1.Env`."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Serve for as long as the block runs."""
        ...


class Serving:
    """The serving resources of one environment. A task of its own enters and leaves them."""

    def __init__(self, env: ServedEnvironment) -> None:
        """Take `env`; nothing is served yet."""
        self._env = env
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()

    async def start(self) -> None:
        """Return when everything is served. May be called again; a start that failed is tried again.

        Raises:
            RolloutFailed: something could not be served.
        """
        if self._started is None or (self._started.done() and self._started.exception() is not None):
            self._started = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._serve(self._started), name="serving")
        try:
            await asyncio.shield(self._started)
        except Exception as exc:  # the environment's own servers
            raise RolloutFailed(
                f"the environment's servers did not start: {describe(exc)}", kind=type(exc).__name__, is_infrastructure=True
            ) from exc

    async def _serve(self, started: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                started.set_result(None)
                await self._closing.wait()
        except Exception as exc:
            if started.done():
                raise
            started.set_exception(exc)

    async def aclose(self) -> None:
        """Stop serving. May be called again."""
        self._closing.set()
        if self._task is not None:
            await self._task
