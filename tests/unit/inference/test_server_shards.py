"""The ranks of a server over several nodes meet at a port that its launcher holds."""

import socket
from datetime import timedelta

import pytest

from trivet.errors import InferenceError
from trivet.inference.server_shards import open_store
from trivet.launcher.ports import ReservedPorts
from trivet.process.server_shard import ServerShard

ADDRESS = "127.0.0.1"


def test_a_rank_finds_what_another_has_written_at_a_port_that_is_held() -> None:
    from torch._C._distributed_c10d import TCPStore

    with ReservedPorts() as ports:
        port = ports.reserve(ADDRESS, preferred=0)
        store = open_store(ServerShard(index=0, num_shards=2, host=ADDRESS, port=port))
        ranks = [TCPStore(ADDRESS, port, 2, is_master=False, timeout=timedelta(seconds=20)) for _ in range(2)]
        ranks[0].set("address of rank 0", "10.0.0.1")
        assert ranks[1].get("address of rank 0") == b"10.0.0.1"
        del ranks, store


def test_a_port_that_another_program_listens_on_is_named() -> None:
    with socket.create_server((ADDRESS, 0)) as other:
        port = int(other.getsockname()[1])
        with pytest.raises(InferenceError, match=rf"cannot meet at 127\.0\.0\.1:{port}"):
            open_store(ServerShard(index=0, num_shards=2, host=ADDRESS, port=port))
