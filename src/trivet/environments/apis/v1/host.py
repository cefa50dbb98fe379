"""Answers group requests with one environment of the v1 API: tasks numbered like examples, one episode for each rollout."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verifiers.v1 import ClientConfig, Env, ModelContext, Sampling, Task, Trace

from trivet.environments.apis.attempts import play_group, within
from trivet.environments.apis.messages import shorten_messages
from trivet.environments.apis.requests import plain_arguments, request_arguments, rollout_seed
from trivet.environments.apis.rescoring import find_example
from trivet.environments.apis.reward_guard import collect_reward_errors, failed_reward
from trivet.environments.apis.v1.episodes import EpisodeReader, PlayedEpisode, incomplete, task_messages
from trivet.environments.apis.v1.rescore import rescore
from trivet.environments.apis.v1.served_turns import ServedTurns
from trivet.environments.apis.v1.serving import Serving
from trivet.environments.workers.stages import Stage, StageBoard
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout

MakeClientConfig = Callable[[str], ClientConfig]
"""Makes the configuration of the clients of the server at a base URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V1Rules:
    """The settings that all groups of an environment share."""

    model_name: str
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    on_reward_error: Literal["drop", "zero"] = "drop"
    timeout_s: float | None = None
    """Longest time for a group, from its first request to its last score."""
    is_plain: bool = False
    """Servers answer text alone: rollouts have no samples."""


class V1Host:
    """Implements `apis.host.EnvironmentHost` for verifiers 0.4 and newer."""

    api = "v1"

    def __init__(
        self,
        env: Env,
        tasks: Sequence[Task],
        *,
        info: EnvironmentInfo,
        name: str,
        rules: V1Rules,
        make_client_config: MakeClientConfig,
        turns: ServedTurns,
        stages: StageBoard,
    ) -> None:
        """Take a loaded environment and its tasks. They are both what is trained on and what is evaluated.

        Args:
            turns: where the clients record what was sampled.
        """
        self._env = env
        self._tasks = tasks
        self._rules = rules
        self._make_client_config = make_client_config
        self._turns = turns
        self._stages = stages
        self._serving = Serving(env)
        self._reader = EpisodeReader(env=name, turns=turns, strategy=rules.trajectory_strategy, is_plain=rules.is_plain)
        self.name = name
        self.info = info

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Play the episodes of a group, or score recorded ones, and return them as scored rollouts.

        Raises:
            RolloutFailed: an episode could not be completed or scored, or a recorded one is not of today's task.
        """
        task = find_example(self._tasks, request.example_id)
        if request.recorded:
            return await rescore(self._env, task, request.recorded, name=self.name)
        rules = self._rules
        minted: list[str] = []

        async def play_one(index: int) -> PlayedEpisode:
            return await self._play(task, request, index, minted)

        try:
            async with within(rules.timeout_s, env=self.name, group_id=request.group_id):
                with self._stages.stage(Stage.GENERATING, num_rollouts=request.num_rollouts):
                    await self._serving.start()
                    played = await play_group(
                        play_one, num_rollouts=request.num_rollouts, env=self.name, group_id=request.group_id
                    )
            rollouts = [self._reader.to_rollout(each.result, index) for index, each in enumerate(played)]
            for rollout, each in zip(rollouts, played, strict=True):
                rollout.num_retries = each.num_retries
            return rollouts
        finally:
            for trace_id in minted:
                self._turns.forget(trace_id)

    async def _play(self, task: Task, request: GroupRequest, index: int, minted: list[str]) -> PlayedEpisode:
        """Play one episode; a reward function that raised is not an error yet, since playing again would not help.

        Raises:
            RolloutFailed: the episode is not complete.
        """
        context = ModelContext(
            model=self._rules.model_name,
            client=self._make_client_config(request.base_url),
            sampling=self._sampling(request, index),
        )
        numbers = itertools.count()

        def begin_trace(trace: Trace) -> None:
            minted.append(trace.id)
            self._turns.begin(trace.id, number=next(numbers))

        value_on_error = 0.0 if self._rules.on_reward_error == "zero" else None
        with collect_reward_errors(value_on_error=value_on_error) as errors:
            [slot] = self._env.slots(task)
            run: Any = self._env.run_slot  # pyright reads the signature of verifiers 0.3.1
            episode = await run(slot, context, on_trace=begin_trace)
        if errors and value_on_error is None:
            return PlayedEpisode(episode=episode, failure=failed_reward(errors[0], env=self.name))
        if not self._env.complete(episode):
            raise incomplete(episode)
        return PlayedEpisode(episode=episode)

    def _sampling(self, request: GroupRequest, index: int) -> Sampling:
        to_arguments = plain_arguments if self._rules.is_plain else request_arguments
        seed = rollout_seed(request.sampling, group_id=request.group_id, index=index)
        return Sampling.model_validate(to_arguments(request.sampling, seed=seed))

    def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that a task starts with."""
        return shorten_messages(task_messages(self._tasks[example_id].data))

    async def aclose(self) -> None:
        """Stop what the environment serves. May be called again."""
        await self._serving.aclose()
