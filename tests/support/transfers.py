"""Transfers of policies into the memory of real servers: what orchestrator and trainer do, in the test's process."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import torch

from support.servers import open_client, secret_file
from support.tiny_models import tiny_model_writer
from trivet.client.server import Server, TargetPolicy
from trivet.client.transfer_rounds import TransferRounds
from trivet.config.layout import RunLayout
from trivet.errors import InferenceError
from trivet.faults import arm
from trivet.secret import make_secret
from trivet.trainer.weight_sender import WeightSender
from trivet.transfer.group import KEY_PURPOSE
from trivet.weights.manifest import Manifest, read_manifest
from trivet.weights.publish import publish
from trivet.wire.versions import PolicyStatus, PolicyVersion, TransferRound


def publish_for_transfer(layout: RunLayout, *, version: int, **options: int | bool) -> Manifest:
    """Publish other weights of the same shape as policy `version`."""
    write = tiny_model_writer(seed=1000 + version, **options)  # type: ignore[arg-type]
    return publish(layout, version=PolicyVersion(version), run_id="test", write=write)


def open_weight_sender(layout: RunLayout, base_url: str, *, device: str = "cpu") -> WeightSender:
    """Return a trainer's sender with the secret of the server at `base_url`."""
    key = make_secret(secret_file(base_url)).derive(KEY_PURPOSE)
    return WeightSender(layout, device=torch.device(device), key=key)


class SenderProcess:
    """A trainer's sender in a process of its own, which kills or stops itself before it sends the first chunk."""

    def __init__(self, layout: RunLayout, base_url: str, *, action: str) -> None:
        schedule = layout.root.parent / "sender-faults.json"
        fault = {"name": "send", "point": "transfer.send", "action": action}
        schedule.write_text(json.dumps({"seed": 0, "faults": [fault]}))
        words = [sys.executable, __file__, str(layout.root), str(secret_file(base_url)), str(schedule)]
        paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths})

    def begin(self, transfer: TransferRound) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(transfer) + b"\n")
        self._process.stdin.flush()

    def __enter__(self) -> "SenderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its pipe, and waits
            self._process.kill()


class Rounds:
    """The orchestrator's part for some servers.

    >>> rounds = Rounds(layout, ["http://127.0.0.1:8000"], announce=sender.begin)
    >>> [status] = rounds.load(1)
    """

    def __init__(
        self, layout: RunLayout, urls: Sequence[str], *, announce: Callable[[TransferRound], None], timeout_s: float = 10.0
    ) -> None:
        self.layout = layout
        self.urls = list(urls)
        self.announced: list[TransferRound] = []
        self._announce = announce

        async def tell(transfer: TransferRound) -> None:
            self.announced.append(transfer)
            self._announce(transfer)

        self._planned = TransferRounds(tell, timeout_s=timeout_s)
        self._servers: dict[str, Server] = {}

    def load(self, version: int) -> list[PolicyStatus | InferenceError]:
        """Make every server serve `version` by one round; return its status, or its error."""
        directory = self.layout.weights_step(version)
        policy = TargetPolicy(version=PolicyVersion(version), digest=read_manifest(directory).digest, directory=directory)

        async def one(server: Server, policy: TargetPolicy) -> PolicyStatus | InferenceError:
            try:
                return await server.ensure_policy(policy, is_known_to_differ=True)
            except InferenceError as exc:
                server.is_admitted = False
                return exc

        async def scenario() -> list[PolicyStatus | InferenceError]:
            async with AsyncExitStack() as stack:
                for url in self.urls:
                    client = open_client(url, timeout_s=240)
                    stack.push_async_callback(client.aclose)
                    server = self._servers.setdefault(url, Server(client=client))
                    server.client, server.is_admitted = client, True
                    server.status = await client.served_policy()
                servers = [self._servers[url] for url in self.urls]
                policies = await self._planned.begin(servers, policy)
                return await asyncio.gather(*(one(server, policies.get(server, policy)) for server in servers))

        return asyncio.run(scenario())


def send_until_killed(root: str, secret: str, schedule: str) -> None:
    """Be the process of `SenderProcess`: read a round from each line."""
    arm(Path(schedule))
    key = make_secret(Path(secret)).derive(KEY_PURPOSE)
    sender = WeightSender(RunLayout(Path(root)), device=torch.device("cpu"), key=key)
    for line in sys.stdin:
        sender.begin(msgspec.json.decode(line, type=TransferRound))


if __name__ == "__main__":
    send_until_killed(*sys.argv[1:])
