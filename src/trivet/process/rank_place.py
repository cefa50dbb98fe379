"""Tells the ranks of a trainer on several nodes who they are and where they meet. Set by the launcher, read by the ranks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

_VARIABLE = "TRAINER_RANK_PLACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The ranks of one node among those of all nodes."""

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
        return {_VARIABLE: f"{self.first_rank} {self.num_ranks} {self.attempt} {self.port} {self.host}"}


def read_place(environ: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Return the place that the launcher set; None for ranks of one machine."""
    text = environ.get(_VARIABLE)
    if text is None:
        return None
    first_rank, num_ranks, attempt, port, host = text.split(" ", 4)
    return RankPlace(first_rank=int(first_rank), num_ranks=int(num_ranks), host=host, port=int(port), attempt=int(attempt))
