"""Inspects real processes and ports from outside."""

import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

_POLL_S = 0.05
_FIRST_PORT, _PORTS = 10_000, 1_000
_port_numbers = itertools.count(os.getpid())


def heed_signals() -> None:
    """Heed signals as a terminal's programs do (a `preexec_fn`). A script's background jobs ignore SIGINT, and under nohup
    SIGHUP too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def descendants_of(pid: int) -> list[psutil.Process]:
    """Return all descendants of `pid`, or none if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended meanwhile
        return False


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if is_alive(process)]


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def descendants_with(word: str, pid: int) -> list[psutil.Process]:
    """Return the descendants of `pid` that have `word` in their command line, parents before children."""
    found: list[psutil.Process] = []
    for process in descendants_of(pid):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if word in " ".join(process.cmdline()):
                found.append(process)
    return found


def assert_named_in_time(output: str, role: str, *, timeout_s: float) -> None:
    """Check that the launcher, which reads reports every five seconds or sooner, named `role` at its first look after
    `timeout_s`."""
    silent = re.search(rf"{role} stuck: {role} has not reported for (\d+) s", output)
    assert silent is not None, output
    assert timeout_s <= int(silent[1]) <= timeout_s + 5


def wait_until(condition: Callable[[], object], *, timeout_s: float, waiting_for: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {waiting_for}")
        time.sleep(_POLL_S)


def assert_all_gone(processes: list[psutil.Process], *, timeout_s: float = 30.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not still_alive(alive), f"left behind: {[(process.pid, process.cmdline()) for process in still_alive(alive)]}"


def assert_port_free(port: int, *, host: str = "127.0.0.1") -> None:
    """Check that nobody listens on the port: a new listener gets it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()


def find_free_port(*, host: str = "127.0.0.1") -> int:
    """Return a free port below the kernel's own range. No other worker of the suite uses it."""
    first = _FIRST_PORT + _PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 20)
    for _ in range(_PORTS):
        port = first + next(_port_numbers) % _PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise AssertionError(f"no port from {first} to {first + _PORTS - 1} is free")
