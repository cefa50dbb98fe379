"""The transport inside one process, for tests: the same frames, checks and resends as over ZeroMQ, without a socket."""

import asyncio
import time
from collections.abc import Callable, Sequence

from trivet.config.schema.shared import TransportConfig
from trivet.transport.messages import Buffer, Inbox, RunKey, is_acknowledged, make_alive, make_message, no_acknowledgement
from trivet.wire.batches import Batch
from trivet.wire.versions import Step

MemoryLink = Callable[[Sequence[Buffer]], bytes | None]
"""Carries frames to the receiver and returns its reply. A test may lose, repeat or damage either."""


class MemoryReceiver:
    def __init__(self, config: TransportConfig, *, run_id: str, attempt: int = 1) -> None:
        self._inbox = Inbox(config, key=RunKey(run_id=run_id, attempt=attempt))

    def deliver(self, frames: Sequence[Buffer]) -> bytes | None:
        """Deliver without a loss; a `MemoryLink`."""
        return self._inbox.accept(frames)

    def receive(self, step: Step) -> Batch:
        return self._inbox.take(step)

    def close(self) -> None:
        self._inbox.fail("the receiver was closed")


class MemorySender:
    """
    >>> receiver = MemoryReceiver(config, run_id="run")
    >>> await MemorySender(config, run_id="run", link=receiver.deliver).send(batch)
    >>> receiver.receive(batch.step)
    """

    def __init__(self, config: TransportConfig, *, run_id: str, attempt: int = 1, link: MemoryLink) -> None:
        self._config = config
        self._key = RunKey(run_id=run_id, attempt=attempt)
        self._link = link

    async def send(self, batch: Batch) -> None:
        message = make_message(batch, key=self._key, max_message_mib=self._config.max_message_mib)
        deadline = time.monotonic() + self._config.timeout_s
        while True:
            reply = self._link(message.frames)
            if reply is not None and is_acknowledged(reply, message=message):
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise no_acknowledgement(batch.step, config=self._config)
            await asyncio.sleep(min(self._config.resend_interval_s, left))

    async def say_alive(self) -> None:
        self._link([make_alive(self._key)])

    async def aclose(self) -> None:
        pass


class ReadyTrainer:
    """A sender whose trainer acknowledges every batch at once."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.on_batch: Callable[[Batch], None] = lambda _: None

    async def say_alive(self) -> None:
        pass

    async def send(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.on_batch(batch)

    async def aclose(self) -> None:
        pass
