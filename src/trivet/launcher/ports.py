"""Free TCP ports that nobody else takes before a role listens on them."""

import errno
import socket
from types import TracebackType

from trivet.errors import ConfigError


class HeldPorts:
    """Ports kept free for this run until it ends.

    A held port is bound, not listened on, with SO_REUSEADDR: the kernel gives it to nobody who asks for any port, and a role
    (vLLM and ZeroMQ set the same option) can still listen on it.

    >>> with HeldPorts() as ports:
    ...     port = ports.take("127.0.0.1", preferred=8000)
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, host: str, *, preferred: int) -> int:
        """Hold `preferred` on `host`, or a free port when another program uses it.

        Raises:
            ConfigError: `host` is no address of this machine.
        """
        if not _is_free(host, preferred):
            preferred = 0
        held = _socket(host)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sockets.append(held)
        held.bind((host, preferred))
        return int(held.getsockname()[1])

    def close(self) -> None:
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> "HeldPorts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _is_free(host: str, port: int) -> bool:
    """Without SO_REUSEADDR a bind fails for a port that is held as well as for one that is listened on."""
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
        except OSError as exc:
            if exc.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise ConfigError(
                f"host {host!r} is not an address of this machine ({exc.strerror}); "
                "use 127.0.0.1, or 0.0.0.0 to be reached from other machines"
            ) from exc
    return True


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
