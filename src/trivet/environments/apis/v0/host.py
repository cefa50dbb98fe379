"""Answers group requests with one environment of the v0 API: plays the rollouts of an example, scores them together."""

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import verifiers as vf

from trivet.environments.apis.attempts import limit_time, play_group
from trivet.environments.apis.causes import is_infrastructure
from trivet.environments.apis.messages import describe, shorten_messages, to_messages
from trivet.environments.apis.requests import plain_arguments, request_arguments, rollout_seed
from trivet.environments.apis.rescoring import find_example
from trivet.environments.apis.trajectories import Turn, make_turn, to_samples
from trivet.environments.apis.v0.scoring import read_scores, rescore, score_group
from trivet.environments.examples import data_digest, example_hashes
from trivet.environments.workers.stages import Stage, StageBoard
from trivet.errors import RolloutFailed
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.workers import HostSettings

MakeClient = Callable[[str], Any]
"""Makes the verifiers client of the server at a base URL: see `model_client.ModelClient`."""

_TOOL_ERROR = "ToolError"
"""verifiers' type of a call that broke a tool whose environment ends the rollout on such errors."""


class V0Host:
    """Implements `apis.host.EnvironmentHost` for verifiers 0.3."""

    api = "v0"

    def __init__(
        self, env: vf.Environment, settings: HostSettings, *, make_client: MakeClient, stages: StageBoard | None = None
    ) -> None:
        """Read the data sets of `env`."""
        self.name = settings.name
        self._env = env
        self._settings = settings
        self._make_client = make_client
        self._clients: dict[str, Any] = {}
        self._stages = stages or StageBoard()
        train: Any = env.build_dataset()
        held_out: Any = env.build_eval_dataset()
        self._datasets: dict[Split, Any] = {Split.TRAIN: train, Split.EVAL: held_out}
        self.info = EnvironmentInfo(
            num_examples=0 if train is None else len(train),
            num_eval_examples=0 if held_out is None else len(held_out),
            train_digest=data_digest(train),
            eval_digest=data_digest(held_out),
            example_hashes=[] if train is None else example_hashes(train, settings.hash_keys),
        )

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group, or score a recorded one, and return its scored rollouts.

        Raises:
            RolloutFailed: a rollout could not be completed or scored, or a recorded one is not of today's example.
        """
        client = self._client(request.base_url)
        dataset, name, num_rollouts = self._datasets[request.split], self.name, request.num_rollouts
        if request.recorded:
            example = find_example(dataset, request.example_id)
            return await rescore(
                self._env, example, request.recorded, client=client, model_name=self._settings.model_name, name=name
            )
        example = dataset[request.example_id]
        async with limit_time(self._settings.rollout_timeout_s, env=name, group_id=request.group_id):
            with self._stages.stage(Stage.GENERATING, num_rollouts=num_rollouts):
                played = await play_group(
                    lambda index: self._play(example, request, index, client=client),
                    num_rollouts=num_rollouts,
                    env=name,
                    group_id=request.group_id,
                )
            with self._stages.stage(Stage.SCORING, num_rollouts=num_rollouts):
                states = [state for (state, _), _ in played]
                drops_errors = self._settings.on_reward_error == "drop"
                scoring_s = await score_group(self._env, states, name=name, drops_errors=drops_errors)
        temperature = 1.0 if request.sampling.temperature is None else request.sampling.temperature
        rollouts: list[Rollout] = []
        for index, ((state, generation_s), num_retries) in enumerate(played):
            rollout = self._to_rollout(state, index, temperature=temperature)
            rollout.generation_s, rollout.scoring_s, rollout.num_retries = generation_s, scoring_s, num_retries
            rollouts.append(rollout)
        return rollouts

    async def _play(
        self, example: Mapping[str, Any], request: GroupRequest, index: int, *, client: Any
    ) -> tuple[dict[str, Any], float]:
        """Play one rollout; return its state, which is not scored yet, and the seconds it took.

        A rollout that a call of the policy to a tool has ended is complete: it is scored like any other, as verifiers scores it.
        """
        started = time.monotonic()
        to_arguments = plain_arguments if self._settings.is_plain else request_arguments
        arguments = to_arguments(request.sampling, seed=rollout_seed(request.sampling, group_id=request.group_id, index=index))
        # Copies, because an environment may change them.
        state: Any = await self._env.rollout(cast("Any", dict(example)), client, self._settings.model_name, arguments)
        error = state.get("error")
        if error is None or _error_of_policy(state):
            return state, time.monotonic() - started
        error = error if isinstance(error, BaseException) else RuntimeError(str(error))
        cause = error.__cause__ or error
        is_retryable = is_infrastructure(error, has_sampled=bool(state["trajectory"]))
        raise RolloutFailed(describe(cause), kind=type(cause).__name__, is_infrastructure=is_retryable) from error

    def _to_rollout(self, state: dict[str, Any], index: int, *, temperature: float) -> Rollout:
        settings, steps = self._settings, state["trajectory"]
        reward, scores = read_scores(state, name=self.name)
        trajectory = to_samples(
            [] if settings.is_plain else [_to_turn(step) for step in steps],
            temperature=temperature,
            strategy=settings.trajectory_strategy,
        )
        if settings.trajectory_strategy == "interleaved" and len(steps) > 1 and not settings.is_plain:
            scores["broken_prefixes"] = float(trajectory.num_broken_prefixes)
        responses = [step["response"] for step in steps]
        return Rollout(
            index=index,
            reward=reward,
            samples=trajectory.samples,
            scores=scores,
            prompt=shorten_messages(state["prompt"]),
            completion=shorten_messages(state.get("completion") or []),
            num_turns=len(steps),
            ended_by=_error_of_policy(state),
            ran_out_of_context=bool(state.get("prompt_too_long")),
            is_cut=settings.is_plain and any(response.message.is_truncated for response in responses),
            counted_tokens=sum(response.usage.completion_tokens for response in responses if response.usage)
            if settings.is_plain
            else 0,
        )

    def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with."""
        return to_messages(self._datasets[split][example_id]["prompt"])

    async def aclose(self) -> None:
        """Close the clients of all servers. May be called again."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()

    def _client(self, base_url: str) -> Any:
        if base_url not in self._clients:
            self._clients[base_url] = self._make_client(base_url)
        return self._clients[base_url]


def _error_of_policy(state: Mapping[str, Any]) -> str:
    """Return the type of the error by which the policy's own call to a tool has ended the rollout; empty when none has."""
    error: Any = state.get("error")
    is_from_tool = any(base.__name__ == _TOOL_ERROR for base in type(error).__mro__)
    return type(error).__name__ if is_from_tool and state["trajectory"] and not is_infrastructure(error) else ""


def _to_turn(step: Mapping[str, Any]) -> Turn:
    """Return the tokens of one step of a trajectory, as a turn to train on."""
    response = step["response"]
    tokens = response.message.tokens
    return make_turn(
        prompt_ids=tokens and tokens.prompt_ids,
        completion_ids=tokens and tokens.completion_ids,
        logprobs=tokens.completion_logprobs if tokens else [],
        policy_versions=response.get("policy_versions"),
        is_truncated=bool(step.get("is_truncated") or response.message.is_truncated),
    )
