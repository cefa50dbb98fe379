"""Tells processes of several nodes who they are and where they meet: ranks of a trainer, and shards of an inference server.

The launcher sets a variable for each process, which reads it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

_RANKS, _SHARD = "TRAINER_RANK_PLACE", "INFERENCE_SERVER_SHARD"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The ranks of one node among those of all nodes of a trainer."""

    first_rank: int
    num_ranks: int
    """Ranks on all nodes."""
    host: str
    """The address at which rank 0 listens for the others; an IP address or a name."""
    port: int
    attempt: int
    """Ranks of different attempts never meet, though they use one port."""

    def environment(self) -> dict[str, str]:
        """Return the variable that carries this to the ranks."""
        return {_RANKS: f"{self.first_rank} {self.num_ranks} {self.attempt} {self.port} {self.host}"}


def read_place(environ: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the place that the launcher set; None for ranks of one machine."""
    if (text := environ.get(_RANKS)) is None:
        return None
    first_rank, num_ranks, attempt, port, host = text.split(" ", 4)
    return RankPlace(first_rank=int(first_rank), num_ranks=int(num_ranks), host=host, port=int(port), attempt=int(attempt))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShard:
    """The share of one node in an inference server: some of its ranks. The first shard also answers requests."""

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
        return {_SHARD: f"{self.index} {self.num_shards} {self.port} {self.host}"}


def read_shard(environ: Mapping[str, str] = os.environ) -> ServerShard | None:
    """Return the shard that the launcher set; None for a server of one node."""
    if (text := environ.get(_SHARD)) is None:
        return None
    index, num_shards, port, host = text.split(" ", 3)
    return ServerShard(index=int(index), num_shards=int(num_shards), host=host, port=int(port))


def shard_name(server: str, index: int) -> str:
    """Return the name of a shard among the processes of its run. The first shard has the name of the server."""
    return f"{server}-shard-{index}" if index else server
