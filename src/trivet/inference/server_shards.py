"""Lets the ranks of an inference server that spans several nodes find each other.

The server is started as vLLM does it with `--nnodes`, `--node-rank` and `--headless`. Its first shard is a server like any other,
whose engine also has the ranks of the other nodes. Every other shard starts the ranks of its node and answers no requests.
"""

from typing import Any

from trivet.errors import InferenceError
from trivet.process.listening import listen
from trivet.process.server_shard import ServerShard


def open_store(shard: ServerShard) -> Any:
    """Open the store in which the ranks of all shards find each other, at one address of the first shard's node.

    It closes when the returned object is deleted.

    Raises:
        InferenceError: another program has the port.
    """
    from torch._C._distributed_c10d import TCPStore  # here: torch takes long to import

    try:
        listener = listen(shard.host, shard.port)
    except OSError as exc:
        raise InferenceError(f"the ranks of this server cannot meet at {shard.host}:{shard.port}: {exc.strerror}") from exc
    return TCPStore(
        shard.host,
        shard.port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
