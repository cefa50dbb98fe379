"""Runs one group of an environment: every rollout of one example, retried on its own, scored together."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import verifiers as vf

from trivet.algorithms.seeds import derive_seed
from trivet.backoff import backoff_s
from trivet.environments.model_client import ModelClient, response_versions
from trivet.environments.reward_guard import collect_reward_errors
from trivet.environments.sampling import plain_arguments, request_arguments
from trivet.environments.trajectories import Turn, to_samples
from trivet.environments.workers.stages import Stage, StageBoard
from trivet.errors import RolloutFailed
from trivet.wire.groups import SamplingArguments
from trivet.wire.rollouts import GroupId, Rollout
from trivet.wire.versions import count_tokens

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
"""Attempts at one rollout, the first included. Then its whole group fails."""
_RETRY_DELAY_S = 1.0
"""Wait before the second attempt; doubled before each later one."""
_MAX_ERROR_CHARS = 2_000
_MAX_TEXT_CHARS = 200_000
"""Longer messages are cut where they are kept for a human to read. Training uses the tokens, which are never cut here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRunner:
    """The environment and the settings that all its groups share."""

    env: vf.Environment
    label: str
    model_name: str
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    on_reward_error: Literal["drop", "zero"] = "drop"
    timeout_s: float | None = None
    """Longest time for a group, from its first request to its last score."""
    is_plain: bool = False
    """Servers answer text alone: rollouts have no samples."""
    stages: StageBoard = field(default_factory=StageBoard)

    async def run(
        self,
        example: Mapping[str, Any],
        *,
        group_id: GroupId,
        num_rollouts: int,
        sampling: SamplingArguments,
        client: ModelClient,
    ) -> list[Rollout]:
        """Run all rollouts of `example` and score them together.

        Args:
            example: a record of the environment's data set, with `prompt`.

        Raises:
            RolloutFailed: one of the rollouts could not be completed or scored.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                with self.stages.stage(Stage.GENERATING, num_rollouts=num_rollouts):
                    states = await self._generate(example, group_id, num_rollouts, sampling, client)
                with self.stages.stage(Stage.SCORING, num_rollouts=num_rollouts):
                    await self._score(states)
        except TimeoutError as exc:
            raise RolloutFailed(
                f"group {group_id} of environment {self.label!r} was not done after rollout_timeout_s ({self.timeout_s:g} s); "
                "raise it if rollouts may take longer",
                kind="TimeoutError",
            ) from exc
        return [self._to_rollout(state, index, temperature=sampling.temperature) for index, state in enumerate(states)]

    async def _generate(
        self,
        example: Mapping[str, Any],
        group_id: GroupId,
        num_rollouts: int,
        sampling: SamplingArguments,
        client: ModelClient,
    ) -> list[vf.State]:
        try:
            async with asyncio.TaskGroup() as attempts:
                running = [
                    attempts.create_task(
                        self._attempt(
                            example, self._arguments(sampling, group_id, index), name=(group_id, index), client=client
                        )
                    )
                    for index in range(num_rollouts)
                ]
        except ExceptionGroup as failed:  # the first failure has ended the others
            raise failed.exceptions[0] from None
        return [attempt.result() for attempt in running]

    def _arguments(self, sampling: SamplingArguments, group_id: GroupId, index: int) -> dict[str, Any]:
        seed = None if sampling.seed is None else derive_seed(sampling.seed, group_id, index) % 2**31
        return plain_arguments(sampling, seed=seed) if self.is_plain else request_arguments(sampling, seed=seed)

    async def _attempt(
        self, example: Mapping[str, Any], arguments: dict[str, Any], *, name: tuple[GroupId, int], client: ModelClient
    ) -> vf.State:
        first: BaseException | None = None
        for attempt in range(_MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(backoff_s(attempt, first_s=_RETRY_DELAY_S))
            try:
                state = await self.env.rollout(cast(Any, dict(example)), client, self.model_name, arguments)
                error = state.get("error")
            except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  the user's code: it costs this rollout
                state, error = None, exc
            if state is not None and error is None:
                return state
            cause = error.__cause__ if isinstance(error, BaseException) and error.__cause__ else error
            first = first or (cause if isinstance(cause, BaseException) else RolloutFailed(str(cause)))
            logger.warning(
                "rollout failed env=%s group=%s index=%s attempt=%s: %s", self.label, *name, attempt + 1, describe(first)
            )
        assert first is not None
        raise RolloutFailed(describe(first), kind=type(first).__name__) from first

    async def _score(self, states: list[vf.State]) -> None:
        started = time.time()
        with collect_reward_errors() as errors:
            try:
                if self.env.score_rollouts:
                    await self.env.rubric.score_group(states)
                else:
                    await self.env.rubric.dummy_score_group(states)
            except Exception as exc:  # the user's code
                raise RolloutFailed(f"scoring failed: {describe(exc)}", kind=type(exc).__name__) from exc
            finally:
                for state in states:
                    await self.env.rubric.cleanup(state)
        if errors and self.on_reward_error == "drop":
            first = errors[0]
            raise RolloutFailed(
                f"reward function {first.function} of environment {self.label!r}: {first.kind}: {cut(first.message)}",
                kind=first.kind,
            )
        for state in states:
            state["timing"].scoring.start, state["timing"].scoring.end = started, time.time()

    def _to_rollout(self, state: vf.State, index: int, *, temperature: float | None) -> Rollout:
        reward = state.get("reward")
        if reward is None or not math.isfinite(reward):
            raise RolloutFailed(
                f"reward of environment {self.label!r} is {reward}, not a finite number", kind="RewardNotFinite"
            )
        timing = state["timing"]
        steps = state["trajectory"]
        trajectory = to_samples(
            [] if self.is_plain else [to_turn(step["response"], is_truncated=step["is_truncated"]) for step in steps],
            temperature=1.0 if temperature is None else temperature,
            strategy=self.trajectory_strategy,
        )
        metrics: dict[str, Any] = state.get("metrics") or {}
        scores = {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
        if self.trajectory_strategy == "interleaved" and len(steps) > 1 and not self.is_plain:
            scores["broken_prefixes"] = float(trajectory.num_broken_prefixes)
        return Rollout(
            index=index,
            reward=float(reward),
            samples=trajectory.samples,
            scores=scores,
            prompt=shorten_messages(state["prompt"]),
            completion=shorten_messages(state.get("completion") or []),
            num_turns=len(steps),
            ran_out_of_context=bool(state.get("prompt_too_long")),
            is_cut=self.is_plain and any(step["response"].message.is_truncated for step in steps),
            counted_tokens=sum(_counted_tokens(step["response"]) for step in steps) if self.is_plain else 0,
            generation_s=timing.generation.duration,
            scoring_s=timing.scoring.duration,
        )


def _counted_tokens(response: vf.Response) -> int:
    return response.usage.completion_tokens if response.usage else 0


def to_turn(response: vf.Response, *, is_truncated: bool = False) -> Turn:
    """Return the tokens of one response, as a turn to train on.

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
    """Return the messages in the OpenAI chat form, as plain data."""
    if isinstance(messages, str):
        return [{"role": "text", "content": messages}]
    return [
        message.model_dump(exclude_none=True, mode="json") if hasattr(message, "model_dump") else dict(message)
        for message in messages
    ]


def shorten_messages(messages: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages as `to_messages` does, with long texts cut: they are kept for a human to read."""
    return [
        {name: cut(value, _MAX_TEXT_CHARS) if isinstance(value, str) else value for name, value in message.items()}
        for message in to_messages(messages)
    ]


def describe(error: BaseException) -> str:
    """Return the type and the text of an error, cut to a length that a log line can carry."""
    return cut(f"{type(error).__name__}: {error}")


def cut(text: str, max_chars: int = _MAX_ERROR_CHARS) -> str:
    """Return `text`, or its first `max_chars` characters with a note of its length."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"
