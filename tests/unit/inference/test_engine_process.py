import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from trivet.errors import InferenceError
from trivet.inference.engine_process import open_rank_store
from trivet.process.sockets import ReservedPorts, ServerShard


def test_a_program_restarts_once_with_its_own_words_and_the_environment() -> None:
    program = (
        "import os, sys\n"
        "from trivet.inference.engine_process import restart_with_environment\n"
        "print(os.getpid(), flush=True)\n"
        "restart_with_environment({'ADDED': 'yes'})\n"
        "print(os.environ['ADDED'], *sys.argv[1:])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ADDED"}
    done = subprocess.run(
        [sys.executable, "-c", program, "@", "a b.toml"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    first, second, words = done.stdout.splitlines()
    assert first == second
    assert words == "yes @ a b.toml"


ADDRESS = "127.0.0.1"


def test_a_rank_finds_what_another_has_written_at_a_port_that_is_held() -> None:
    from torch._C._distributed_c10d import TCPStore

    with ReservedPorts() as ports:
        port = ports.reserve(ADDRESS, preferred=0)
        store = open_rank_store(ServerShard(index=0, num_shards=2, host=ADDRESS, port=port))
        ranks = [TCPStore(ADDRESS, port, 2, is_master=False, timeout=timedelta(seconds=20)) for _ in range(2)]
        ranks[0].set("address of rank 0", "10.0.0.1")
        assert ranks[1].get("address of rank 0") == b"10.0.0.1"
        del ranks, store


def test_a_port_that_another_program_listens_on_is_named() -> None:
    with socket.create_server((ADDRESS, 0)) as other:
        port = int(other.getsockname()[1])
        with pytest.raises(InferenceError, match=rf"cannot meet at 127\.0\.0\.1:{port}"):
            open_rank_store(ServerShard(index=0, num_shards=2, host=ADDRESS, port=port))
