"""Answers group requests with one environment of the v0 API: data sets by split, a client per server."""

from collections.abc import Callable
from typing import Any

from trivet.environments.apis.messages import to_messages
from trivet.environments.apis.rescoring import find_example
from trivet.environments.apis.v0.rescore import rescore
from trivet.environments.apis.v0.runner import GroupRunner, ServerClient
from trivet.environments.examples import data_digest, example_hashes
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout

MakeClient = Callable[[str], ServerClient]
"""Makes the client of the server at a base URL."""


class V0Host:
    """Implements `apis.host.EnvironmentHost` for verifiers 0.1.2 to 0.3.1."""

    api = "v0"

    def __init__(self, runner: GroupRunner, *, make_client: MakeClient, hash_keys: tuple[str, ...] = ()) -> None:
        """Read the data sets of the runner's environment.

        Args:
            hash_keys: fields that an example's hash covers; those it does not have are left out.
        """
        self._runner = runner
        self._make_client = make_client
        self._clients: dict[str, ServerClient] = {}
        self.name = runner.label
        train, held_out = _datasets(runner.env)
        self._datasets: dict[Split, Any] = {Split.TRAIN: train, Split.EVAL: held_out}
        self.info = EnvironmentInfo(
            num_examples=0 if train is None else len(train),
            num_eval_examples=0 if held_out is None else len(held_out),
            train_digest=data_digest(train),
            eval_digest=data_digest(held_out),
            example_hashes=[] if train is None else example_hashes(train, hash_keys),
        )

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group, or score a recorded one, and return its scored rollouts.

        Raises:
            RolloutFailed: a rollout could not be completed or scored, or a recorded one is not of today's example.
        """
        if request.recorded:
            return await rescore(
                self._runner.env,
                find_example(self._datasets[request.split], request.example_id),
                request.recorded,
                client=self._client(request.base_url).for_rollout(),
                model_name=self._runner.model_name,
                name=self.name,
            )
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

    def _client(self, base_url: str) -> ServerClient:
        client = self._clients.get(base_url)
        if client is None:
            client = self._clients[base_url] = self._make_client(base_url)
        return client


def _datasets(env: Any) -> tuple[Any, Any]:
    """Return the data sets to train on and to evaluate on, None for one that the environment does not have."""
    if hasattr(env, "build_dataset"):  # since 0.1.10
        return env.build_dataset(), env.build_eval_dataset()
    return env.dataset, env.eval_dataset
