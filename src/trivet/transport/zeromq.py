"""Batches over ZeroMQ: the trainer's rank 0 binds, the orchestrator connects. Either may start first, or start again.

ZeroMQ drops messages when a peer goes away, read by it or not, so nothing here relies on it: what counts is the trainer's
acknowledgement. The last one may go with the trainer, which ends by itself; then another sign that it had the batch counts.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from trivet.config.shared import TransportConfig
from trivet.errors import ConfigError
from trivet.faults import reach
from trivet.transport.frames import Message, RunKey, is_acknowledged, make_alive, make_message, no_acknowledgement
from trivet.transport.inbox import Inbox
from trivet.wire.batches import Batch
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

_CLOSE_POLL_MS = 50
"""How long the receiver's thread takes to notice that it should end."""
_LAST_ANSWER_S = 5.0
"""How long the receiver stays for the sender to read its last answer."""
_LAST_WORDS_MS = 1_000
"""How long the sender stays for its last message to leave."""
_HEARTBEAT_MS = 10_000
"""A peer whose machine vanished is noticed and the connection made anew."""


def _address(config: TransportConfig) -> str:
    return f"tcp://{config.host}:{config.port}"


class ZmqSender:
    """The orchestrator's end. Use it from one task at a time.

    >>> sender = ZmqSender(config, run_id="run", attempt=1)
    >>> await sender.send(batch)
    >>> await sender.aclose()
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        run_id: str,
        attempt: int = 1,
        has_arrived: Callable[[Batch], bool] = lambda batch: False,
    ) -> None:
        """
        Args:
            has_arrived: asked before a batch is sent again: whether something else shows that the trainer has it.
        """
        self._config = config
        self._key = RunKey(run_id=run_id, attempt=attempt)
        self._has_arrived = has_arrived
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without a trainer there is nothing to queue for: copies of a batch must not pile up for its return.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.connect(_address(config))

    async def send(self, batch: Batch) -> None:
        message = make_message(batch, key=self._key, max_message_mib=self._config.max_message_mib)
        deadline = time.monotonic() + self._config.timeout_s
        num_sent = 0
        reach("batch_send.before", step=batch.step)
        while (now := time.monotonic()) < deadline:
            if num_sent:
                if self._has_arrived(batch):
                    logger.info("batch arrived, its acknowledgement did not step=%d", batch.step)
                    return
                logger.info("batch sent again step=%d times=%d", batch.step, num_sent)
            if await self._exchange(message, until=min(now + self._config.resend_interval_s, deadline)):
                reach("batch_send.after", step=batch.step)
                await self._say(acknowledged=batch.step)  # what a trainer waits for that ends
                return
            num_sent += 1
        if self._has_arrived(batch):
            return
        raise no_acknowledgement(batch.step, config=self._config)

    async def say_alive(self) -> None:
        await self._say()

    async def aclose(self) -> None:
        self._socket.close(_LAST_WORDS_MS)
        self._context.term()

    async def _say(self, *, acknowledged: Step | None = None) -> None:
        # There is no trainer, or a batch is on its way, which says as much; behind one the word would stand in a queue.
        with contextlib.suppress(zmq.Again, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_MS / 1000):
                await self._socket.send(make_alive(self._key, acknowledged=acknowledged), zmq.NOBLOCK)

    async def _exchange(self, message: Message, *, until: float) -> bool:
        """Send `message` once, if there is a trainer, and read replies; whether it was acknowledged before `until`."""
        try:
            async with asyncio.timeout(until - time.monotonic()):
                # pyzmq leaves the type of a frame open
                await self._socket.send_multipart(message.frames, copy=False)  # pyright: ignore[reportUnknownMemberType]
                reach("batch_send.during", step=message.header.step)
                while True:
                    reply = await self._socket.recv()
                    if is_acknowledged(reply, message=message):
                        return True
        except TimeoutError:
            return False


class ZmqReceiver:
    """The trainer's end. A thread of its own answers while the trainer computes.

    >>> receiver = ZmqReceiver(config, run_id="run", attempt=1)
    >>> batch = receiver.receive(Step(1))
    >>> receiver.close()
    """

    def __init__(
        self, config: TransportConfig, *, run_id: str, attempt: int = 1, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            on_wait: called now and then while `receive` waits, by the thread that called it.
        """
        self._inbox = Inbox(config, key=RunKey(run_id=run_id, attempt=attempt), on_wait=on_wait)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        try:
            self._socket.bind(_address(config))
        except zmq.ZMQError as exc:
            self._context.destroy()
            raise ConfigError(
                f"the trainer cannot listen on rollout_transport.host = {config.host!r}, port = {config.port}: {exc}; "
                "choose a free port and give it to trainer and orchestrator"
            ) from exc
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="batch-receiver", daemon=True)
        self._thread.start()

    def receive(self, step: Step) -> Batch:
        return self._inbox.take(step)

    def close(self) -> None:
        self._inbox.wait_until_read(_LAST_ANSWER_S)
        self._is_closing.set()
        self._thread.join()
        self._context.destroy()
        self._inbox.fail("the receiver was closed")

    def _answer(self) -> None:
        """Runs in the thread, the only one that touches the socket until it has ended."""
        try:
            while not self._is_closing.is_set():
                if self._socket.poll(_CLOSE_POLL_MS):
                    self._answer_one()
        except Exception as exc:  # whatever it was, the trainer that waits must hear of it, or it would wait for nothing
            logger.exception("receiver failed")
            self._inbox.fail(f"its receiver failed with {type(exc).__name__}: {exc}")

    def _answer_one(self) -> None:
        sender, *frames = self._socket.recv_multipart(copy=False)
        step = self._inbox.wanted or 0
        reply = None
        for _ in range(reach("batch_acknowledge.before", step=step)):
            reply = self._inbox.accept([frame.buffer for frame in frames])
        if reply is not None:
            for _ in range(reach("batch_acknowledge.after", step=step)):
                self._socket.send_multipart([sender.bytes, reply])
