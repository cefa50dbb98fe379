"""Answers group requests with one environment of the v1 API: tasks numbered like examples, one episode for each rollout."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from verifiers.v1 import ClientConfig, Env, ModelContext, Sampling, Task, Trace

from trivet.environments.apis.attempts import limit_time, play_group
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
from trivet.wire.workers import HostSettings

MakeClientConfig = Callable[[str], ClientConfig]
"""Makes the configuration of the clients of the server at a base URL."""


class V1Host:
    """Implements `apis.host.EnvironmentHost` for verifiers 0.4 and newer."""

    api = "v1"

    def __init__(
        self,
        env: Env,
        tasks: Sequence[Task],
        settings: HostSettings,
        *,
        info: EnvironmentInfo,
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
        self._settings = settings
        self._make_client_config = make_client_config
        self._turns = turns
        self._stages = stages
        self._serving = Serving(env)
        self._reader = EpisodeReader(
            env=settings.name, turns=turns, strategy=settings.trajectory_strategy, is_plain=settings.is_plain
        )
        self.name = settings.name
        self.info = info

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Play the episodes of a group, or score recorded ones, and return them as scored rollouts.

        Raises:
            RolloutFailed: an episode could not be completed or scored, or a recorded one is not of today's task.
        """
        task = find_example(self._tasks, request.example_id)
        if request.recorded:
            return await rescore(self._env, task, request.recorded, name=self.name)
        trace_ids: list[str] = []
        try:
            async with limit_time(self._settings.rollout_timeout_s, env=self.name, group_id=request.group_id):
                with self._stages.stage(Stage.GENERATING, num_rollouts=request.num_rollouts):
                    await self._serving.start()
                    played = await play_group(
                        lambda index: self._play(task, request, index, trace_ids),
                        num_rollouts=request.num_rollouts,
                        env=self.name,
                        group_id=request.group_id,
                    )
            rollouts: list[Rollout] = []
            for index, (episode, num_retries) in enumerate(played):
                rollouts.append(self._reader.to_rollout(episode, index))
                rollouts[-1].num_retries = num_retries
            return rollouts
        finally:
            for trace_id in trace_ids:
                self._turns.forget(trace_id)

    async def _play(self, task: Task, request: GroupRequest, index: int, trace_ids: list[str]) -> PlayedEpisode:
        """Play one episode; a reward function that raised is not an error yet, since playing again would not help."""
        settings = self._settings
        to_arguments = plain_arguments if settings.is_plain else request_arguments
        seed = rollout_seed(request.sampling, group_id=request.group_id, index=index)
        context = ModelContext(
            model=settings.model_name,
            client=self._make_client_config(request.base_url),
            sampling=Sampling.model_validate(to_arguments(request.sampling, seed=seed)),
        )
        numbers = itertools.count()

        def begin_trace(trace: Trace) -> None:
            trace_ids.append(trace.id)
            self._turns.begin(trace.id, number=next(numbers))

        value_on_error = 0.0 if settings.on_reward_error == "zero" else None
        with collect_reward_errors(value_on_error=value_on_error) as errors:
            [slot] = self._env.slots(task)
            run: Any = self._env.run_slot  # pyright reads the signature of verifiers 0.3.1
            episode = await run(slot, context, on_trace=begin_trace)
        if errors and value_on_error is None:
            return PlayedEpisode(episode=episode, failure=failed_reward(errors[0], env=self.name))
        if not self._env.complete(episode):
            raise incomplete(episode)
        return PlayedEpisode(episode=episode)

    def prompt(self, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that a task starts with."""
        return shorten_messages(task_messages(self._tasks[example_id].data))

    async def aclose(self) -> None:
        """Stop what the environment serves. May be called again."""
        await self._serving.aclose()
