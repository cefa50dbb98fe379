"""Reserves ports for the processes of a run, makes sockets that listen on them, and encrypts ZeroMQ connections.

`RankPlace` and `ServerShard` are the addresses at which processes of several nodes connect: ranks of a trainer, and shards of an
inference server. The launcher sets them in an environment variable of each process.

To reserve a port, the launcher binds it without listening, and then allows to share it (SO_REUSEPORT). The kernel lets only sockets
of the same user share a port. So no other user can take the port before the role listens on it.
"""

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from trivet.errors import ConfigError

if TYPE_CHECKING:
    import zmq

MAX_FRAME_BYTES = 1 << 20
"""Limit of one frame. ZeroMQ reads a whole frame before it checks whether the sender has the key, so a stranger's connection takes
at most this much memory."""
MAX_CURVE_BYTES = 64
"""Bytes that the encryption adds to a frame: the name of the command, a nonce and an authentication code."""
_HANDSHAKE_MS = 10_000
"""A connection that has not shown the key after this time is closed. A loaded machine needs a fraction of a second."""
_CONNECT_TIMEOUT_S = 1.0
_ANY_PORT = 9
_RANKS_VARIABLE, _SHARD_VARIABLE = "TRAINER_RANK_PLACE", "INFERENCE_SERVER_SHARD"


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
                reserved.bind(
                    (host, preferred)
                )  # without SO_REUSEPORT: of two runs that start together, only one gets the port
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
        """Release the ports. May be called again."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> "ReservedPorts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port`, which may be a reserved port.

    Raises:
        OSError: another program uses the port, or `host` is not an address of this machine.
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
    """Return whether `port` is reserved: another socket has bound it and does not listen. Then it can only be shared."""
    with _socket(host) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                return False
        else:
            return False
    with _socket(host) as caller:
        caller.settimeout(_CONNECT_TIMEOUT_S)
        return caller.connect_ex((host, port)) != 0


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address of the loopback interface, or the name of one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_towards(host: str) -> str:
    """Return the address of the interface through which this node reaches `host`. Nothing is sent.

    Raises:
        OSError: `host` is not known, or there is no way there.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def listen_encrypted(endpoint: "zmq.Socket[Any]", *, host: str, port: int, key: bytes) -> None:
    """Make `endpoint` listen with encryption (CURVE), on a port that may be reserved.

    The key pair of the listening end is derived from `key`. A client needs its public key for the handshake, and this public key
    never crosses the network. So only a process with `key` can connect or be connected to, and no list of clients (ZAP) is needed.

    Args:
        key: 32 secret bytes that both ends have.

    Raises:
        OSError: the port is in use.
    """
    import zmq  # imported in the functions because most processes that reserve ports or listen need no ZeroMQ

    _set_limits(endpoint)
    endpoint.curve_server = True
    endpoint.curve_publickey, endpoint.curve_secretkey = key_pair(key)
    endpoint.setsockopt(zmq.USE_FD, listen(host, port).detach())
    endpoint.bind(_address(host, port))


def connect_encrypted(endpoint: "zmq.Socket[Any]", *, host: str, port: int, key: bytes) -> str:
    """Make `endpoint` connect to the process that listens there with the same `key`, now or as soon as there is one.

    Returns:
        The address, as `endpoint.disconnect` takes it.
    """
    import zmq

    _set_limits(endpoint)
    endpoint.curve_serverkey, _ = key_pair(key)
    endpoint.curve_publickey, endpoint.curve_secretkey = zmq.curve_keypair()
    endpoint.connect(address := _address(host, port))
    return address


def _set_limits(endpoint: "zmq.Socket[Any]") -> None:
    """Bound what a stranger who connects can take. Closing the socket drops what is queued."""
    import zmq

    endpoint.setsockopt(zmq.IPV6, 1)  # in addition to IPv4
    endpoint.setsockopt(zmq.LINGER, 0)
    endpoint.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + MAX_CURVE_BYTES)
    endpoint.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def key_pair(key: bytes) -> tuple[bytes, bytes]:
    """Return the public and the private key of the listening end."""
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
    """The trainer ranks of one node, and the address at which the ranks of all nodes meet."""

    first_rank: int
    num_ranks: int
    """Number of ranks on all nodes."""
    host: str
    """The address at which rank 0 listens for the others: an IP address or a name."""
    port: int
    attempt: int
    """The attempt of the run. Ranks of different attempts use the same port and must not connect to each other."""

    def environment(self) -> dict[str, str]:
        """Return the environment variable that passes this to the ranks."""
        return {_RANKS_VARIABLE: msgspec.json.encode(self).decode()}


def read_place(environ: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the place that the launcher set; None when all ranks are on one machine."""
    return msgspec.json.decode(environ[_RANKS_VARIABLE], type=RankPlace) if _RANKS_VARIABLE in environ else None


class ServerShard(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one node in an inference server: some of its ranks. The first shard also answers requests."""

    index: int
    num_shards: int
    host: str
    """The address at which the first shard listens for the ranks of all shards: an IP address or a name."""
    port: int

    @property
    def is_first(self) -> bool:
        """True for the shard that answers requests."""
        return self.index == 0

    def environment(self) -> dict[str, str]:
        """Return the environment variable that passes this to the shard."""
        return {_SHARD_VARIABLE: msgspec.json.encode(self).decode()}


def read_shard(environ: Mapping[str, str] = os.environ) -> ServerShard | None:
    """Return the shard that the launcher set; None for a server on one node."""
    return msgspec.json.decode(environ[_SHARD_VARIABLE], type=ServerShard) if _SHARD_VARIABLE in environ else None


def shard_name(server: str, index: int) -> str:
    """Return the name of a shard among the processes of its run. The first shard has the name of the server."""
    return f"{server}-shard-{index}" if index else server
