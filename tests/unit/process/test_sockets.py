"""Ports are found, not fixed. Nobody else gets one that is held."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import pytest

from support.processes import assert_port_free, find_free_port
from trivet.errors import ConfigError
from trivet.process.sockets import ReservedPorts, listen

HOST = "127.0.0.1"


def test_a_free_port_is_kept_and_a_taken_one_replaced() -> None:
    wanted = find_free_port()
    with ReservedPorts() as ports:
        assert ports.reserve(HOST, preferred=wanted) == wanted
        with ReservedPorts() as others:
            assert others.reserve(HOST, preferred=wanted) != wanted
    assert_port_free(wanted)


def test_a_role_listens_on_a_held_port() -> None:
    with ReservedPorts() as ports:
        port = ports.reserve(HOST, preferred=find_free_port())
        for _ in range(2):  # a role that ended is started again
            with listen(HOST, port) as server:
                socket.create_connection((HOST, port)).close()
                server.accept()[0].close()
                with pytest.raises(OSError, match="Address already in use"):
                    listen(HOST, port)


@contextmanager
def as_another_user() -> Iterator[None]:
    """Have sockets opened meanwhile belong to another user."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("options", [[], ["REUSEADDR"], ["REUSEPORT"], ["REUSEADDR", "REUSEPORT"]])
def test_another_user_cannot_listen_on_a_held_port(options: list[str]) -> None:
    with ReservedPorts() as ports:
        port = ports.reserve(HOST, preferred=find_free_port())
        with as_another_user():
            taker = socket.socket()
        with taker:
            for option in options:
                taker.setsockopt(socket.SOL_SOCKET, getattr(socket, f"SO_{option}"), 1)
            with pytest.raises(OSError, match="Address already in use"):
                taker.bind((HOST, port))


def test_of_runs_that_start_at_one_moment_one_gets_the_port() -> None:
    wanted, at_once = find_free_port(), Barrier(4)

    def take(ports: ReservedPorts) -> int:
        at_once.wait()
        return ports.reserve(HOST, preferred=wanted)

    with ThreadPoolExecutor(4) as runs:
        for _ in range(50):
            held = [ReservedPorts() for _ in range(4)]
            taken = list(runs.map(take, held))
            for ports in held:
                ports.close()
            assert len(set(taken)) == 4
            assert wanted in taken


def test_the_address_of_another_machine_is_refused_and_no_port_is_given_twice() -> None:
    with ReservedPorts() as ports:
        with pytest.raises(ConfigError, match="not an address of this machine"):
            ports.reserve("192.0.2.1", preferred=8000)
        taken = [ports.reserve(HOST, preferred=8000) for _ in range(50)]
    assert len(set(taken)) == len(taken)
