"""Tells the shards of an inference server that spans several nodes who they are and where they meet.

A shard is what runs on one node: some of the server's ranks. The first shard also answers requests. The launcher sets a variable
for each shard, which reads it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

_VARIABLE = "INFERENCE_SERVER_SHARD"


def shard_name(server: str, index: int) -> str:
    """Return the name of a shard among the processes of its run. The first shard has the name of the server."""
    return f"{server}-shard-{index}" if index else server


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShard:
    """The share of one node in an inference server."""

    index: int
    num_shards: int
    host: str
    """The address at which the first shard listens for the ranks of all shards; an IP address or a name."""
    port: int

    @property
    def is_first(self) -> bool:
        """True for the shard that answers requests."""
        return self.index == 0

    def environment(self) -> dict[str, str]:
        """Return the variable that carries this to the shard."""
        return {_VARIABLE: f"{self.index} {self.num_shards} {self.port} {self.host}"}


def read_shard(environ: Mapping[str, str] = os.environ) -> ServerShard | None:
    """Return the shard that the launcher set; None for a server of one node."""
    text = environ.get(_VARIABLE)
    if text is None:
        return None
    index, num_shards, port, host = text.split(" ", 3)
    return ServerShard(index=int(index), num_shards=int(num_shards), host=host, port=int(port))
