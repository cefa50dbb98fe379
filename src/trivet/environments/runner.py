"""Runs one group of an environment: every rollout of one example, retried on its own, scored together."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import verifiers as vf

from trivet.algorithms.seeds import derive_seed
from trivet.config.orchestrator import SamplingConfig
from trivet.environments.model_client import ModelClient, request_arguments, response_versions
from trivet.environments.trajectories import Turn, to_samples
from trivet.errors import RolloutFailed
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
    sampling: SamplingConfig
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"

    async def run(
        self, example: Mapping[str, Any], *, group_id: GroupId, num_rollouts: int, client: ModelClient
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
                    attempts.create_task(self._attempt(example, group_id=group_id, index=index, client=client))
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
        return [self._to_rollout(state, index) for index, state in enumerate(states)]

    async def _attempt(self, example: Mapping[str, Any], *, group_id: GroupId, index: int, client: ModelClient) -> vf.State:
        seed = None if self.sampling.seed is None else derive_seed(self.sampling.seed, group_id, index) % 2**31
        arguments = request_arguments(self.sampling, seed=seed)
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
            logger.warning(
                "rollout failed env=%s group=%s index=%s attempt=%s: %s", self.label, group_id, index, attempt + 1, message
            )
        raise RolloutFailed(first_error)

    def _to_rollout(self, state: vf.State, index: int) -> Rollout:
        reward = state.get("reward")
        if reward is None or not math.isfinite(reward):
            raise RolloutFailed(f"reward of environment {self.label!r} is {reward}, not a finite number")
        timing = state["timing"]
        trajectory = to_samples(
            [to_turn(step["response"], is_truncated=step["is_truncated"]) for step in state["trajectory"]],
            temperature=self.sampling.temperature,
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
            prompt=_messages(state["prompt"]),
            completion=_messages(state.get("completion") or []),
            num_turns=len(state["trajectory"]),
            generation_s=timing.generation.duration,
            scoring_s=timing.scoring.duration,
        )


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


def _messages(messages: str | Sequence[Any]) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "text", "content": messages}]
    return [
        message.model_dump(exclude_none=True, mode="json") if hasattr(message, "model_dump") else dict(message)
        for message in messages
    ]
