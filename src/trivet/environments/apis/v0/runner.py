"""Runs one group of an environment: every rollout of one example, retried on its own, scored together."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import verifiers as vf

from trivet.environments.apis.attempts import Attempted, play_group, within
from trivet.environments.apis.messages import shorten_messages
from trivet.environments.apis.requests import plain_arguments, request_arguments, rollout_seed
from trivet.environments.apis.trajectories import to_samples
from trivet.environments.apis.v0.play import error_of_policy, play, steps_of
from trivet.environments.apis.v0.rubrics import read_scores, score_group
from trivet.environments.apis.v0.turns import counted_tokens, is_cut, to_turn
from trivet.environments.workers.stages import Stage, StageBoard
from trivet.wire.groups import SamplingArguments
from trivet.wire.rollouts import GroupId, Rollout


class ServerClient(Protocol):
    """The connections to one server. Adapters: `model_client.ModelClient` and `openai_client.OpenAIServer`."""

    def for_rollout(self) -> Any:
        """Return what the rollout of an environment calls for completions."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


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
        client: ServerClient,
    ) -> list[Rollout]:
        """Run all rollouts of `example` and score them together.

        Args:
            example: a record of the environment's data set, with `prompt`.

        Raises:
            RolloutFailed: one of the rollouts could not be completed or scored.
        """
        to_arguments = plain_arguments if self.is_plain else request_arguments

        async def play_one(index: int) -> tuple[dict[str, Any], float]:
            started = time.monotonic()
            state = await play(
                self.env,
                example,
                client=client.for_rollout(),
                model_name=self.model_name,
                arguments=to_arguments(sampling, seed=rollout_seed(sampling, group_id=group_id, index=index)),
            )
            return state, time.monotonic() - started

        async with within(self.timeout_s, env=self.label, group_id=group_id):
            with self.stages.stage(Stage.GENERATING, num_rollouts=num_rollouts):
                played = await play_group(play_one, num_rollouts=num_rollouts, env=self.label, group_id=group_id)
            with self.stages.stage(Stage.SCORING, num_rollouts=num_rollouts):
                states = [each.result[0] for each in played]
                scoring_s = await score_group(self.env, states, name=self.label, drops_errors=self.on_reward_error == "drop")
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        return [
            self._to_rollout(each, index, temperature=temperature, scoring_s=scoring_s) for index, each in enumerate(played)
        ]

    def _to_rollout(
        self, played: Attempted[tuple[dict[str, Any], float]], index: int, *, temperature: float, scoring_s: float
    ) -> Rollout:
        state, generation_s = played.result
        reward, scores = read_scores(state, name=self.label)
        steps = steps_of(state)
        trajectory = to_samples(
            [] if self.is_plain else [to_turn(response, is_truncated=is_truncated) for response, is_truncated in steps],
            temperature=temperature,
            strategy=self.trajectory_strategy,
        )
        if self.trajectory_strategy == "interleaved" and len(steps) > 1 and not self.is_plain:
            scores["broken_prefixes"] = float(trajectory.num_broken_prefixes)
        return Rollout(
            index=index,
            reward=reward,
            samples=trajectory.samples,
            scores=scores,
            prompt=shorten_messages(state["prompt"]),
            completion=shorten_messages(state.get("completion") or []),
            num_turns=len(steps),
            num_retries=played.num_retries,
            ended_by=error_of_policy(state),
            ran_out_of_context=bool(state.get("prompt_too_long")),
            is_cut=self.is_plain and any(is_cut(response) for response, _ in steps),
            counted_tokens=sum(counted_tokens(response) for response, _ in steps) if self.is_plain else 0,
            generation_s=generation_s,
            scoring_s=scoring_s,
        )
