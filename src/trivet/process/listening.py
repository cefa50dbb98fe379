"""Lets a role listen on a port that its launcher holds for it, so that no other user of the machine gets it in between.

The launcher's socket is bound and allows sharing (SO_REUSEPORT), which the kernel grants to sockets of the same user alone.
"""

import errno
import socket

_CONNECT_TIMEOUT_S = 1.0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError: the port is another's, or `host` is no address of this machine.
    """
    listener = _socket(host)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_held(host, port):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def is_held(host: str, port: int) -> bool:
    """Return whether a socket must share `port` to get it: someone has it and does not listen on it."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return exc.errno == errno.EADDRINUSE and not _is_answered(host, port)
    return False


def _is_answered(host: str, port: int) -> bool:
    with _socket(host) as caller:
        caller.settimeout(_CONNECT_TIMEOUT_S)
        return caller.connect_ex((host, port)) == 0


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
