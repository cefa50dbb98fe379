"""Encrypts ZeroMQ connections (CURVE) with a key that both ends have.

The listening end's pair of keys is made of that key. Its public half never crosses the network, and a handshake needs it, so nobody
without the key gets past the handshake in either direction; there is no further list of clients to keep (ZAP).
"""

from typing import Any

import zmq
from zmq.utils import z85

from trivet.process.listening import listen

MAX_FRAME_BYTES = 1 << 20
"""Limit of one frame. ZeroMQ reads a whole frame before it knows whether the sender has the key, so a stranger's connection
costs no more."""
MAX_CURVE_BYTES = 64
"""The bytes that encryption adds to a frame: its command's name, a nonce and a code that shows damage."""


def listen_encrypted(socket: "zmq.Socket[Any]", *, host: str, port: int, key: bytes) -> None:
    """Have `socket` listen on a port that this process or its launcher holds.

    Args:
        key: 32 bytes.

    Raises:
        OSError: the port is in use.
    """
    socket.setsockopt(zmq.IPV6, 1)  # besides IPv4
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = key_pair(key)
    socket.setsockopt(zmq.USE_FD, listen(host, port).detach())
    socket.bind(_address(host, port))


def connect_encrypted(socket: "zmq.Socket[Any]", *, host: str, port: int, key: bytes) -> None:
    """Have `socket` connect, now or when someone listens there who has `key`."""
    socket.setsockopt(zmq.IPV6, 1)  # besides IPv4
    socket.curve_serverkey, _ = key_pair(key)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(_address(host, port))


def in_frames(data: bytes) -> list[memoryview]:
    """Return `data` in frames of at most `MAX_FRAME_BYTES`, at least one."""
    whole = memoryview(data)
    return [whole[start : start + MAX_FRAME_BYTES] for start in range(0, max(1, len(whole)), MAX_FRAME_BYTES)]


def key_pair(key: bytes) -> tuple[bytes, bytes]:
    """Return the public and the private key of the end that listens."""
    private = z85.encode(key)
    return zmq.curve_public(private), private


def _address(host: str, port: int) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
