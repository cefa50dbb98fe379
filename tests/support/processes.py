"""Looks at real processes and ports from outside, for tests that end some of them violently."""

import signal
import socket
import time
from collections.abc import Callable

import psutil

_POLL_S = 0.05


def heed_signals() -> None:
    """For `preexec_fn`: as from a terminal. What a script starts in the background ignores SIGINT, under nohup SIGHUP too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def descendants_of(pid: int) -> list[psutil.Process]:
    """Children of `pid`, their children and so on; empty when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those of `processes` that run; one that ended and was not waited for does not."""
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def wait_until(condition: Callable[[], object], *, timeout_s: float, waiting_for: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {waiting_for}")
        time.sleep(_POLL_S)


def assert_all_gone(processes: list[psutil.Process], *, timeout_s: float = 5.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not still_alive(alive), f"left behind: {[(process.pid, process.cmdline()) for process in still_alive(alive)]}"


def assert_port_free(port: int, *, host: str = "127.0.0.1") -> None:
    """Nobody listens on it: a new listener gets it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()


def find_free_port(*, host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
