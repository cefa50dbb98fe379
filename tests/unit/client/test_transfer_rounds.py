"""Which servers take part in a round, and when connections are used again."""

import asyncio
from pathlib import Path

from trivet.client.inference_client import InferenceClient
from trivet.client.server import Server, TargetPolicy
from trivet.client.transfer_rounds import TransferRounds
from trivet.wire.versions import PolicyStatus, PolicyVersion, TransferRound

POLICY = TargetPolicy(version=PolicyVersion(3), digest="d", directory=Path("/weights/step_3"))


def server(url: str, *, num_workers: int, port: int = 7) -> Server:
    made = Server(client=InferenceClient(url, timeout_s=1.0), is_admitted=True)
    made.status = PolicyStatus(version=PolicyVersion(2), digest="c", num_workers=num_workers, transfer_port=port)
    return made


class Announced:
    def __init__(self) -> None:
        self.rounds: list[TransferRound] = []
        self.planned = TransferRounds(self._announce, timeout_s=4.0)

    async def _announce(self, transfer: TransferRound) -> None:
        self.rounds.append(transfer)

    def begin(self, *servers: Server) -> dict[Server, TargetPolicy]:
        return asyncio.run(self.planned.begin(servers, POLICY))


def test_ranks_follow_from_the_workers_that_servers_report() -> None:
    announced = Announced()
    first, without, second = (
        server("http://a:1", num_workers=2),
        server("http://b:1", num_workers=0),
        server("http://c:1", num_workers=3),
    )
    never_asked = Server(client=InferenceClient("http://d:1", timeout_s=1.0), is_admitted=True)
    policies = announced.begin(first, without, second, never_asked)
    [transfer] = announced.rounds
    assert (transfer.host, transfer.port, transfer.world_size, transfer.version, transfer.rank_offset) == ("a", 7, 6, 3, 0)
    assert transfer.digest == POLICY.digest
    orders = {each: policy.transfer for each, policy in policies.items() if policy.transfer is not None}
    assert {each: order.rank_offset for each, order in orders.items()} == {first: 1, second: 3}
    assert {(order.group_id, order.world_size, order.timeout_s) for order in orders.values()} == {(transfer.group_id, 6, 4.0)}
    assert {policy.version for policy in policies.values()} == {3}


def test_nothing_is_announced_without_a_server_that_can_take_part() -> None:
    announced = Announced()
    assert announced.begin(server("http://a:1", num_workers=0)) == {}
    assert announced.rounds == []


def test_no_two_rounds_have_the_same_connections() -> None:
    announced = Announced()
    servers = [server("http://a:1", num_workers=1), server("http://b:1", num_workers=1)]
    for _ in range(3):
        announced.begin(*servers)
    assert len({transfer.group_id for transfer in announced.rounds}) == 3
