"""Carries the messages between the head and the agents: ZeroMQ, encrypted with keys of the run's secret.

As between orchestrator and trainer (`transport.zeromq`), nobody without the secret gets past the handshake, in either direction.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import zmq

from trivet.launcher.nodes.messages import Beat, Hello, Orders, Refused
from trivet.launcher.nodes.registry import NodeRegistry
from trivet.process.sockets import connect_encrypted, listen_encrypted
from trivet.secret import RunSecret
from trivet.storage.durable import DECODE_ERRORS

_KEY_PURPOSE = "nodes/head"
_MAX_BYTES = 16 << 20
"""The largest message: the reports of a node's processes take kilobytes."""
_HANDSHAKE_MS = 10_000
"""A connection that has not shown the secret by then is closed."""
_HEARTBEAT_MS = 1_000
"""A connection whose line was cut is made anew after three of these; TCP alone would wait for minutes."""
_POLL_MS = 200
"""The thread notices within this time that it should end."""

_decode_request = msgspec.msgpack.Decoder(Hello | Beat).decode
_decode_answer = msgspec.msgpack.Decoder(Orders | Refused).decode


def _bound(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _HEARTBEAT_MS)  # the kernel would wait longer after each failure
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)


class ControlServer:
    """The head's end: a thread that gives each message to the registry and sends back its answer. The thread touches no file.

    >>> with ControlServer(registry, host="10.0.0.1", port=41000, secret=secret):
    ...     supervise()
    """

    def __init__(
        self,
        registry: NodeRegistry,
        *,
        host: str,
        port: int,
        secret: RunSecret,
        may_answer: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """Listen on `port`, which this process holds.

        Args:
            may_answer: returns False while agents must not hear that this node leads. It must touch no file, because that may hang.

        Raises:
            OSError: it is another's.
        """
        self._registry = registry
        self._may_answer = may_answer
        self._clock = clock
        self._unix_time = unix_time
        self._context = zmq.Context[Any]()
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket)
        # An agent that connects anew takes the place of its own old connection, which may not have ended yet.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            listen_encrypted(self._socket, host=host, port=port, key=secret.derive(_KEY_PURPOSE))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-control", daemon=True)

    def __enter__(self) -> "ControlServer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        try:
            self._answer()
        except Exception as exc:  # noqa: BLE001  # the supervisor raises it: nodes that nobody hears would look lost
            self._registry.fail(exc)

    def _answer(self) -> None:
        while not self._is_closing.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            key, *frames = self._socket.recv_multipart()
            try:
                message = _decode_request(b"".join(frames))
            except DECODE_ERRORS:
                answer = Refused(reason="it speaks another version: install one version of trivet on all nodes", is_final=True)
            else:
                answer = self._registry.receive(key, message, now=self._clock(), unix_time=self._unix_time())
            if not self._may_answer():
                continue
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart([key, msgspec.msgpack.encode(answer)], flags=zmq.DONTWAIT)


class ControlClient:
    """An agent's end of one connection. Use it from one thread.

    >>> client = ControlClient(host="10.0.0.1", port=41000, secret=secret)
    >>> client.send(hello)
    >>> for answer in client.receive(timeout_s=0.1): ...
    """

    def __init__(self, *, host: str, port: int, secret: RunSecret) -> None:
        self._context = zmq.Context[Any]()
        self._socket = self._context.socket(zmq.DEALER)
        _bound(self._socket)
        # What could not be sent is worthless a moment later: the next beat says more.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 4)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self._socket.setsockopt(zmq.ROUTING_ID, secrets.token_hex(16).encode())
        connect_encrypted(self._socket, host=host, port=port, key=secret.derive(_KEY_PURPOSE))

    def send(self, message: Hello | Beat) -> None:
        """Send a message, or drop it while there is no connection."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(msgspec.msgpack.encode(message), flags=zmq.DONTWAIT)

    def receive(self, *, timeout_s: float) -> list[Orders | Refused]:
        """Return the answers that came, after at most `timeout_s` when there are none."""
        answers: list[Orders | Refused] = []
        timeout_ms = int(timeout_s * 1000)
        while self._socket.poll(timeout_ms):
            with contextlib.suppress(*DECODE_ERRORS):  # of another version; the node gives up in time
                answers.append(_decode_answer(self._socket.recv()))
            timeout_ms = 0
        return answers

    def close(self) -> None:
        """End the connection."""
        self._context.destroy(linger=0)
