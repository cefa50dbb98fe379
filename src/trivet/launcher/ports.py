"""Reserves free TCP ports, so that nobody else takes one before a role listens on it."""

import errno
import socket
from types import TracebackType

from trivet.errors import ConfigError


class ReservedPorts:
    """Keeps ports free for this run until it ends.

    A reserved port is bound, not listened on, with SO_REUSEPORT set afterwards: the kernel gives it to no other user and to nobody
    who asks for any port, and a role, which sets the same option, can still listen on it (`trivet.process.listening`).
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve(self, host: str, *, preferred: int) -> int:
        """Reserve `preferred` on `host`, or a free port when another program uses it.

        Raises:
            ConfigError: `host` is no address of this machine.
        """
        held = _socket(host)
        self._sockets.append(held)
        try:
            if not _bind(held, host, preferred):
                held.bind((host, 0))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise ConfigError(f"no port of {host!r} is free: {exc.strerror}; end programs that listen on it") from exc
            raise ConfigError(
                f"host {host!r} is not an address of this machine ({exc.strerror}); "
                "use 127.0.0.1, or 0.0.0.0 to be reached from other machines"
            ) from exc
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return int(held.getsockname()[1])

    def close(self) -> None:
        """Give the ports up. May be called again."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> "ReservedPorts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _bind(held: socket.socket, host: str, port: int) -> bool:
    """Return False when the port is reserved by another run, or listened on.

    Without SO_REUSEPORT: of two runs that start at one moment, one gets it.
    """
    try:
        held.bind((host, port))
    except OSError as exc:
        if exc.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise
    return True


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
