"""Sends batches over ZeroMQ: the trainer's rank 0 binds, the orchestrator connects. Either may start first, or start again.

ZeroMQ may drop messages when a peer goes away. So a batch counts as delivered only when the trainer's acknowledgement has come. The
acknowledgement of the last batch may be lost when the trainer ends; then `has_arrived` finds another sign that the trainer had it.

Connections are encrypted with a key that is derived from the run's secret (`process.sockets`). A stranger who connects can make
this process hold at most one frame, for at most ten seconds.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from trivet.config.layout import SECRET_FILE
from trivet.config.schema.shared import RunIdentity, TransportConfig
from trivet.errors import ConfigError, WaitTimeout
from trivet.faults import reach
from trivet.process.sockets import connect_encrypted, listen_encrypted
from trivet.secret import RunSecret
from trivet.transport.messages import BatchMessage, Inbox, RepeatedWarning, is_acknowledged, make_message
from trivet.wire.batches import Alive, Batch
from trivet.wire.codec import encode
from trivet.wire.versions import Step, TransferRound

logger = logging.getLogger(__name__)

KEY_PURPOSE = "transport/trainer"
"""Purpose for which the key of these connections is derived from the run's secret."""
_CLOSE_POLL_MS = 50
"""The receiver's thread notices within this time that it should end."""
_LAST_ANSWER_S = 5.0
"""Longest time for which the receiver waits, when it closes, for the sender to read its last answer."""
_LINGER_MS = 1_000
"""Longest time for which the sender waits for its last message to leave."""
_HEARTBEAT_MS = 10_000
"""Interval of ZeroMQ's heartbeats. They show that a peer's machine has vanished, so that the connection is made again."""
_MAX_QUEUED = 4
"""Limit of messages of one peer that wait to be read. A peer sends one and waits for the answer."""
_MAX_RECONNECT_MS = 1_000
"""Longest pause between two attempts to connect; the pause grows up to this."""
_REPORTED_FAILURES = 3
"""Number of failed handshakes in a row after which a stranger is reported. A trainer that ends may interrupt one or two."""
_SAME_SECRET_ADVICE = f"give both roles the same {SECRET_FILE}"
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class _Handshakes:
    """Counts the failed handshakes of a socket. Use it from the thread that uses the socket."""

    def __init__(self, socket: "zmq.Socket[Any]", context: "zmq.Context[Any]") -> None:
        self._socket = socket
        address = f"inproc://handshakes-{id(socket)}"
        socket.monitor(address, _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        # A plain context over the same ZeroMQ context: sockets of an asyncio context would have to be awaited.
        self._events: zmq.Socket[bytes] = zmq.Context[zmq.Socket[bytes]](shadow=context).socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        # No limit on queued events: a full queue would block ZeroMQ's thread that sends and receives.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        self.num_failed_in_a_row = 0

    def read(self) -> int:
        """Return how many handshakes failed since the last call, and update `num_failed_in_a_row`."""
        num_failed = 0
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            is_failure = bool(event & _HANDSHAKE_FAILED)
            num_failed += is_failure
            self.num_failed_in_a_row = self.num_failed_in_a_row + 1 if is_failure else 0
        return num_failed

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._events.close()


class ZmqSender:
    """The orchestrator's end of the connection. Call `send` from one task at a time."""

    def __init__(
        self,
        config: TransportConfig,
        *,
        secret: RunSecret,
        run: RunIdentity,
        has_arrived: Callable[[Batch], bool] = lambda batch: False,
    ) -> None:
        """Connect, without waiting for the trainer.

        Args:
            has_arrived: called before a batch is sent again; returns whether something else shows that the trainer has it.
        """
        self._config = config
        self._run = run
        self._has_arrived = has_arrived
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Queue no message while no trainer is connected: otherwise copies of a batch would pile up until it connects.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._handshakes = _Handshakes(self._socket, self._context)
        self._stranger_warning = RepeatedWarning(logger)
        connect_encrypted(self._socket, host=config.advertise or config.host, port=config.port, key=secret.derive(KEY_PURPOSE))

    async def send(self, batch: Batch) -> None:
        """Send `batch` until the trainer acknowledges it, as `BatchSender.send`."""
        message = make_message(batch, run=self._run, max_message_mib=self._config.max_message_mib)
        deadline = time.monotonic() + self._config.timeout_s
        num_sent = 0
        reach("batch_send.before", step=batch.step)
        while (now := time.monotonic()) < deadline:
            if num_sent:
                if self._has_arrived(batch):
                    logger.info("batch arrived, its acknowledgement did not step=%d", batch.step)
                    return
                logger.info("batch sent again step=%d times=%d", batch.step, num_sent)
                if stranger := self._find_stranger():
                    self._stranger_warning.log(stranger)
            if await self._exchange(message, until=min(now + self._config.resend_interval_s, deadline)):
                reach("batch_send.after", step=batch.step)
                await self.say_alive(acknowledged=batch.step)  # a trainer that ends waits for this message
                return
            num_sent += 1
        if self._has_arrived(batch):
            return
        remedy = self._find_stranger() or "see the trainer's log, or raise orchestrator.rollout_transport.timeout_s"
        raise WaitTimeout(
            f"the orchestrator waited {self._config.timeout_s:g} s for the trainer on {self._config.host}:{self._config.port} to "
            f"acknowledge batch {batch.step}; {remedy}"
        )

    async def say_alive(self, *, acknowledged: Step | None = None, transfer: TransferRound | None = None) -> None:
        """Send a sign of life, as `BatchSender.say_alive`.

        Args:
            acknowledged: the batch whose acknowledgement was just read; None when the message is only a sign of life.
        """
        alive = Alive(run_id=self._run.id, attempt=self._run.attempt, acknowledged=acknowledged, transfer=transfer)
        # The message is left out while no trainer is connected, and while a batch is being sent: that is a sign of life too.
        with contextlib.suppress(zmq.Again, TimeoutError):
            async with asyncio.timeout(_LINGER_MS / 1000):
                await self._socket.send(encode(alive), zmq.NOBLOCK)

    async def aclose(self) -> None:
        """Close the socket, after at most a second for the last message to leave."""
        self._handshakes.close()
        self._socket.close(_LINGER_MS)
        self._context.term()

    def _find_stranger(self) -> str | None:
        """Describe a stranger that listens in the trainer's place without the run's secret; None when there is none."""
        self._handshakes.read()
        if self._handshakes.num_failed_in_a_row < _REPORTED_FAILURES:
            return None
        return f"what listens on {self._config.host}:{self._config.port} does not have this run's secret; {_SAME_SECRET_ADVICE}"

    async def _exchange(self, message: BatchMessage, *, until: float) -> bool:
        """Send `message` once and read replies until `until`. Return whether the message was acknowledged."""
        try:
            async with asyncio.timeout(until - time.monotonic()):
                # pyzmq leaves the type of a frame open
                await self._socket.send_multipart(message.frames, copy=False)  # pyright: ignore[reportUnknownMemberType]
                reach("batch_send.during", step=message.header.step)
                while True:
                    if is_acknowledged(await self._socket.recv(), header=message.header):
                        return True
        except TimeoutError:
            return False


class ZmqReceiver:
    """The trainer's end of the connection. It has a thread that answers while the trainer computes."""

    def __init__(
        self,
        config: TransportConfig,
        *,
        secret: RunSecret,
        run: RunIdentity,
        on_wait: Callable[[], None] = lambda: None,
        on_transfer: Callable[[TransferRound], None] = lambda _: None,
    ) -> None:
        """Listen, and start the thread that answers.

        Args:
            on_wait: called every 30 s while `receive` waits, in the thread of its caller.
            on_transfer: called with a round that the trainer should begin, in the thread that answers.
        """
        self._inbox = Inbox(config, run=run, on_wait=on_wait, on_transfer=on_transfer)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        self._handshakes = _Handshakes(self._socket, self._context)
        self._stranger_warning = RepeatedWarning(logger)
        self._address = f"{config.host}:{config.port}"
        try:
            listen_encrypted(self._socket, host=config.host, port=config.port, key=secret.derive(KEY_PURPOSE))
        except OSError as exc:
            self._handshakes.close()
            self._context.destroy()
            raise ConfigError(
                f"the trainer cannot listen on rollout_transport.host = {config.host!r}, port = {config.port}: {exc.strerror}; "
                "choose a free port and give it to trainer and orchestrator"
            ) from exc
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="batch-receiver", daemon=True)
        self._thread.start()

    def receive(self, step: Step) -> Batch:
        """Wait for the batch of `step`, as `BatchReceiver.receive`."""
        return self._inbox.take(step)

    def close(self) -> None:
        """End the thread and free the port, once the last answer was read or after a few seconds."""
        self._inbox.wait_until_read(_LAST_ANSWER_S)
        self._is_closing.set()
        self._thread.join()
        self._handshakes.close()
        self._context.destroy()
        self._inbox.fail("the receiver was closed")

    def _answer(self) -> None:
        """Answer messages until `close`, in the receiver's thread. No other thread uses the socket before this one has ended."""
        try:
            while not self._is_closing.is_set():
                if self._socket.poll(_CLOSE_POLL_MS):
                    self._answer_one()
                if self._handshakes.read():
                    self._stranger_warning.log(
                        f"someone without this run's secret connected to {self._address}; {_SAME_SECRET_ADVICE}"
                    )
        except Exception as exc:  # whatever failed: otherwise the trainer would wait in vain
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
