"""Answers group requests with one loaded environment: data sets by split, a model client per server.

Every pool is built on it: `LocalPool` holds hosts in this process, a worker process holds one.
"""

from collections.abc import Callable
from typing import Any

from trivet.environments.examples import example_hashes
from trivet.environments.model_client import ModelClient
from trivet.environments.runner import GroupRunner, to_messages
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout

MakeClient = Callable[[str], ModelClient]
"""Makes the client of the server at a base URL."""


class EnvironmentHost:
    """A loaded environment, its data sets, and its clients of the servers.

    >>> host = EnvironmentHost(runner, make_client=make_client)
    >>> rollouts = await host.run_group(request)
    >>> await host.aclose()
    """

    def __init__(self, runner: GroupRunner, *, make_client: MakeClient, hash_keys: tuple[str, ...] = ()) -> None:
        """Read the data sets of the runner's environment.

        Args:
            hash_keys: fields that an example's hash covers; those it does not have are left out.
        """
        self._runner = runner
        self._make_client = make_client
        self._clients: dict[str, ModelClient] = {}
        self.name = runner.label
        self._datasets: dict[Split, Any] = {
            Split.TRAIN: runner.env.build_dataset(),
            Split.EVAL: runner.env.build_eval_dataset(),
        }
        train, held_out = self._datasets[Split.TRAIN], self._datasets[Split.EVAL]
        self.info = EnvironmentInfo(
            num_examples=0 if train is None else len(train),
            num_eval_examples=0 if held_out is None else len(held_out),
            example_hashes=[] if train is None else example_hashes(train, hash_keys),
        )

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group and return its scored rollouts.

        Raises:
            RolloutFailed: a rollout could not be completed or scored.
        """
        return await self._runner.run(
            self._datasets[request.split][request.example_id],
            group_id=request.group_id,
            num_rollouts=request.num_rollouts,
            sampling=request.sampling,
            client=self._client(request.base_url),
        )

    def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with."""
        return to_messages(self._datasets[split][example_id]["prompt"])

    async def aclose(self) -> None:
        """Close the clients of all servers. May be called again."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    def _client(self, base_url: str) -> ModelClient:
        client = self._clients.get(base_url)
        if client is None:
            client = self._clients[base_url] = self._make_client(base_url)
        return client
