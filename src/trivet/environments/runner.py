"""Runs one group of an environment: every rollout of one example, retried on its own, scored together."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import verifiers as vf

from trivet.algorithms.seeds import derive_seed
from trivet.environments.model_client import ModelClient, response_versions
from trivet.environments.sampling import request_arguments
from trivet.environments.trajectories import Turn, to_samples
from trivet.errors import RolloutFailed
from trivet.wire.groups import SamplingArguments
from trivet.wire.rollouts import GroupId, Rollout
from trivet.wire.versions import count_tokens

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_RETRY_DELAY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunner:
    """Everything that stays the same between the groups of one environment."""

    env: vf.Environment
    label: str
    model_name: str
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"

    async def run(
        self,
        example: Mapping[str, Any],
        *,
        group_id: GroupId,
        num_rollouts: int,
        sampling: SamplingArguments,
        client: ModelClient,
    ) -> list[Rollout]:
        """
        Args:
            example: a row of the environment's data set, with `prompt`.

        Raises:
            RolloutFailed: one of the rollouts could not be completed or scored.
        """
        try:
            async with asyncio.TaskGroup() as attempts:
                running = [
                    attempts.create_task(
                        self._attempt(example, _arguments(sampling, group_id, index), name=(group_id, index), client=client)
                    )
                    for index in range(num_rollouts)
                ]
        except ExceptionGroup as failed:  # the first failure has ended the others
            raise failed.exceptions[0] from None
        states = [attempt.result() for attempt in running]
        try:
            await self.env.rubric.score_group(states)
        finally:
            for state in states:
                await self.env.rubric.cleanup(state)
        return [self._to_rollout(state, index, temperature=sampling.temperature) for index, state in enumerate(states)]

    async def _attempt(
        self, example: Mapping[str, Any], arguments: dict[str, Any], *, name: tuple[GroupId, int], client: ModelClient
    ) -> vf.State:
        first_error = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_RETRY_DELAY_S * 2 ** (attempt - 1))
            try:
                state = await self.env.rollout(cast(Any, dict(example)), client, self.model_name, arguments)
                error = state.get("error")
            except Exception as exc:  # noqa: BLE001  an environment is the user's code: what it raises costs this rollout only
                state, error = None, exc
            if state is not None and error is None:
                return state
            cause = error.__cause__ if isinstance(error, BaseException) and error.__cause__ else error
            message = f"{type(cause).__name__}: {cause}"
            first_error = first_error or message
            logger.warning("rollout failed env=%s group=%s index=%s attempt=%s: %s", self.label, *name, attempt + 1, message)
        raise RolloutFailed(first_error)

    def _to_rollout(self, state: vf.State, index: int, *, temperature: float | None) -> Rollout:
        reward = state.get("reward")
        if reward is None or not math.isfinite(reward):
            raise RolloutFailed(f"reward of environment {self.label!r} is {reward}, not a finite number")
        timing = state["timing"]
        trajectory = to_samples(
            [to_turn(step["response"], is_truncated=step["is_truncated"]) for step in state["trajectory"]],
            temperature=1.0 if temperature is None else temperature,
            strategy=self.trajectory_strategy,
        )
        scores = {name: float(value) for name, value in (state.get("metrics") or {}).items() if value is not None}
        if trajectory.num_broken_prefixes:
            scores["broken_prefixes"] = float(trajectory.num_broken_prefixes)
        return Rollout(
            index=index,
            reward=float(reward),
            samples=trajectory.samples,
            scores=scores,
            prompt=to_messages(state["prompt"]),
            completion=to_messages(state.get("completion") or []),
            num_turns=len(state["trajectory"]),
            ran_out_of_context=bool(state.get("prompt_too_long")),
            generation_s=timing.generation.duration,
            scoring_s=timing.scoring.duration,
        )


def _arguments(sampling: SamplingArguments, group_id: GroupId, index: int) -> dict[str, Any]:
    seed = None if sampling.seed is None else derive_seed(sampling.seed, group_id, index) % 2**31
    return request_arguments(sampling, seed=seed)


def to_turn(response: vf.Response, *, is_truncated: bool = False) -> Turn:
    """
    Raises:
        RolloutFailed: the server's answer lacks token ids or the policy of each token.
    """
    tokens = response.message.tokens
    versions = response_versions(response)
    if tokens is None or versions is None or count_tokens(versions) != len(tokens.completion_ids):
        raise RolloutFailed(
            "the server's answer does not carry token ids and the policy that sampled each; is it `uv run inference`?"
        )
    return Turn(
        prompt_ids=tokens.prompt_ids,
        completion_ids=tokens.completion_ids,
        logprobs=tokens.completion_logprobs,
        versions=versions,
        is_truncated=is_truncated or bool(response.message.is_truncated),
    )


def to_messages(messages: str | Sequence[Any]) -> list[dict[str, Any]]:
    """In the OpenAI chat form, as plain data."""
    if isinstance(messages, str):
        return [{"role": "text", "content": messages}]
    return [
        message.model_dump(exclude_none=True, mode="json") if hasattr(message, "model_dump") else dict(message)
        for message in messages
    ]
