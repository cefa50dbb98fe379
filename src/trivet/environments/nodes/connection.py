"""Opens the sockets between the orchestrator and the pools of other nodes. Used by both ends."""

from typing import Any

import zmq
import zmq.asyncio

KEY_PURPOSE = "nodes/environments"
"""Purpose for which the key of the connections is derived from the run's secret."""
_HEARTBEAT_MS = 1_000
_HEARTBEAT_TIMEOUT_MS = 5_000
"""A connection whose line was cut is made anew after this long; TCP alone would wait for minutes."""
_MAX_RECONNECT_MS = 1_000
"""The pause between attempts to connect grows up to this."""
_MAX_QUEUED = 64
"""Messages that wait to be read, before the other end has to wait."""


def open_socket(context: zmq.asyncio.Context, kind: zmq.SocketType) -> "zmq.asyncio.Socket":
    """Open a socket that neither listens nor connects yet."""
    socket: Any = context.socket(kind)
    for option, value in {
        zmq.RCVHWM: _MAX_QUEUED,
        zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: _HEARTBEAT_TIMEOUT_MS,
        zmq.RECONNECT_IVL_MAX: _MAX_RECONNECT_MS,
        zmq.CONNECT_TIMEOUT: _MAX_RECONNECT_MS,
    }.items():
        socket.setsockopt(option, value)
    return socket
