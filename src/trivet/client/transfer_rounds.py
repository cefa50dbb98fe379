"""Plans transfers of policies from the trainer's memory to the servers: who takes part, over which connections."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec

from trivet.client.server import Server, TargetPolicy
from trivet.wire.versions import TransferRound

Announce = Callable[[TransferRound], Awaitable[None]]
"""Tells the trainer of a round. It may get lost: then the servers load from files."""


class TransferRounds:
    """The rounds of a run, which are independent of each other."""

    def __init__(self, announce: Announce, *, timeout_s: float) -> None:
        """Plan rounds whose exchanges take at most `timeout_s` each."""
        self._announce = announce
        self._timeout_s = timeout_s

    async def begin(self, servers: Sequence[Server], policy: TargetPolicy) -> dict[Server, TargetPolicy]:
        """Announce a round for `policy` to those of `servers` that can take part; return the policy for each of these."""
        able = {server: server.status for server in servers if server.status is not None and server.status.num_workers}
        if not able:
            return {}
        first = next(iter(able))
        transfer = TransferRound(
            version=policy.version,
            digest=policy.digest or "",
            group_id=secrets.token_hex(16),
            host=urlsplit(first.root).hostname or "",
            port=able[first].transfer_port,
            world_size=1 + sum(status.num_workers for status in able.values()),
            timeout_s=self._timeout_s,
        )
        await self._announce(transfer)
        policies: dict[Server, TargetPolicy] = {}
        rank = 1
        for server, status in able.items():
            policies[server] = replace(policy, transfer=msgspec.structs.replace(transfer, rank_offset=rank))
            rank += status.num_workers
        return policies
