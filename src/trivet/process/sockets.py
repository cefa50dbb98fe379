"""Reserves ports for the processes of a run, has them listen there, and encrypts ZeroMQ connections between them.

It also tells processes of several nodes where they meet: ranks of a trainer, and shards of an inference server. The launcher sets a
variable for each process, which reads it.

The launcher binds a port and does not listen on it. It then allows sharing (SO_REUSEPORT), which the kernel grants to sockets of
the same user alone: nobody else gets the port before the role that listens on it.
"""

import errno
import os
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from trivet.errors import ConfigError

if TYPE_CHECKING:
    import zmq

MAX_FRAME_BYTES = 1 << 20
"""Limit of one frame. ZeroMQ reads a whole frame before it knows whether the sender has the key, so a stranger's connection
costs no more."""
MAX_CURVE_BYTES = 64
"""The bytes that encryption adds to a frame: its command's name, a nonce and a code that shows damage."""
_CONNECT_TIMEOUT_S = 1.0
_RANKS, _SHARD = "TRAINER_RANK_PLACE", "INFERENCE_SERVER_SHARD"


class ReservedPorts:
    """Keeps ports free for this run until it ends."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve(self, host: str, *, preferred: int) -> int:
        """Reserve `preferred` on `host`, or a free port when another program uses it.

        Raises:
            ConfigError: `host` is no address of this machine.
        """
        reserved = _socket(host)
        self._sockets.append(reserved)
        try:
            try:
                reserved.bind((host, preferred))  # without SO_REUSEPORT: of two runs that start at one moment, one gets it
            except OSError as exc:
                if exc.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                reserved.bind((host, 0))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise ConfigError(f"no port of {host!r} is free: {exc.strerror}; end programs that listen on it") from exc
            raise ConfigError(
                f"host {host!r} is not an address of this machine ({exc.strerror}); "
                "use 127.0.0.1, or 0.0.0.0 to be reached from other machines"
            ) from exc
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return int(reserved.getsockname()[1])

    def close(self) -> None:
        """Give the ports up. May be called again."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> "ReservedPorts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError: the port is another's, or `host` is no address of this machine.
    """
    listener = _socket(host)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_reserved(host, port):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def is_reserved(host: str, port: int) -> bool:
    """Return whether a socket must share `port` to get it: someone has it and does not listen on it."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                return False
        else:
            return False
    with _socket(host) as caller:
        caller.settimeout(_CONNECT_TIMEOUT_S)
        return caller.connect_ex((host, port)) != 0


def listen_encrypted(endpoint: "zmq.Socket[Any]", *, host: str, port: int, key: bytes) -> None:
    """Have `endpoint` listen, encrypted (CURVE), on a port that this process or its launcher has reserved.

    The listening end's pair of keys is made of `key`. Its public half never crosses the network, and a handshake needs it, so
    nobody without `key` gets past the handshake in either direction; there is no further list of clients to keep (ZAP).

    Args:
        key: 32 bytes.

    Raises:
        OSError: the port is in use.
    """
    import zmq  # here and below: most processes that reserve ports or listen need no ZeroMQ

    endpoint.setsockopt(zmq.IPV6, 1)  # besides IPv4
    endpoint.curve_server = True
    endpoint.curve_publickey, endpoint.curve_secretkey = key_pair(key)
    endpoint.setsockopt(zmq.USE_FD, listen(host, port).detach())
    endpoint.bind(_address(host, port))


def connect_encrypted(endpoint: "zmq.Socket[Any]", *, host: str, port: int, key: bytes) -> None:
    """Have `endpoint` connect, now or when someone listens there who has `key`."""
    import zmq

    endpoint.setsockopt(zmq.IPV6, 1)  # besides IPv4
    endpoint.curve_serverkey, _ = key_pair(key)
    endpoint.curve_publickey, endpoint.curve_secretkey = zmq.curve_keypair()
    endpoint.connect(_address(host, port))


def key_pair(key: bytes) -> tuple[bytes, bytes]:
    """Return the public and the private key of the end that listens."""
    import zmq
    from zmq.utils import z85

    private = z85.encode(key)
    return zmq.curve_public(private), private


def in_frames(data: bytes) -> list[memoryview]:
    """Return `data` in frames of at most `MAX_FRAME_BYTES`, at least one."""
    whole = memoryview(data)
    return [whole[start : start + MAX_FRAME_BYTES] for start in range(0, max(1, len(whole)), MAX_FRAME_BYTES)]


def _address(host: str, port: int) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one node among those of all nodes of a trainer."""

    first_rank: int
    num_ranks: int
    """Ranks on all nodes."""
    host: str
    """The address at which rank 0 listens for the others; an IP address or a name."""
    port: int
    attempt: int
    """Ranks of different attempts never meet, though they use one port."""

    def environment(self) -> dict[str, str]:
        """Return the variable that carries this to the ranks."""
        return {_RANKS: msgspec.json.encode(self).decode()}


def read_place(environ: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the place that the launcher set; None for ranks of one machine."""
    return msgspec.json.decode(environ[_RANKS], type=RankPlace) if _RANKS in environ else None


class ServerShard(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one node in an inference server: some of its ranks. The first shard also answers requests."""

    index: int
    num_shards: int
    host: str
    """The address at which the first shard listens for the ranks of all shards; an IP address or a name."""
    port: int

    @property
    def is_first(self) -> bool:
        """True for the shard that answers requests."""
        return self.index == 0

    def environment(self) -> dict[str, str]:
        """Return the variable that carries this to the shard."""
        return {_SHARD: msgspec.json.encode(self).decode()}


def read_shard(environ: Mapping[str, str] = os.environ) -> ServerShard | None:
    """Return the shard that the launcher set; None for a server of one node."""
    return msgspec.json.decode(environ[_SHARD], type=ServerShard) if _SHARD in environ else None


def shard_name(server: str, index: int) -> str:
    """Return the name of a shard among the processes of its run. The first shard has the name of the server."""
    return f"{server}-shard-{index}" if index else server
