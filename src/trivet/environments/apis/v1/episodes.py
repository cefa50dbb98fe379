"""Makes a rollout of a finished episode: the sampled message nodes of its traces become samples, its rewards one reward."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verifiers.v1 import Episode, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire

from trivet.environments.apis.causes import names_infrastructure
from trivet.environments.apis.messages import cut, shorten_messages
from trivet.environments.apis.reward_guard import measured, require_reward
from trivet.environments.apis.trajectories import Trajectory, Turn, to_samples
from trivet.environments.apis.v1.client import OUT_OF_CONTEXT
from trivet.environments.apis.v1.served_turns import ServedTurns
from trivet.errors import RolloutFailed
from trivet.wire.rollouts import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """An episode that is over."""

    episode: Episode
    failure: RolloutFailed | None = None
    """Why it cannot be scored; None when it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReader:
    """Turns the episodes of one environment into rollouts."""

    env: str
    """The environment's name."""
    turns: ServedTurns
    strategy: Literal["interleaved", "branching"]
    is_plain: bool = False
    """Servers answer text alone: rollouts have no samples."""

    def to_rollout(self, played: PlayedEpisode, index: int) -> Rollout:
        """Return the episode as rollout `index` of its group.

        With several agents, the reward is the mean over the agents that are trained; each agent's own is a score.

        Raises:
            RolloutFailed: it was not scored, or its reward is no number that can be trained on.
        """
        if played.failure is not None:
            raise played.failure
        episode = played.episode
        traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
        reward = math.fsum(read_reward(trace, env=self.env) for trace in traces) / len(traces)
        trajectories = [] if self.is_plain else [self._trajectory(trace) for trace in traces if trace.agent.trainable]
        scores = _scores(episode)
        if self.strategy == "interleaved" and episode.num_turns > 1 and not self.is_plain:
            scores["broken_prefixes"] = float(sum(trajectory.num_broken_prefixes for trajectory in trajectories))
        usage = episode.usage
        return Rollout(
            index=index,
            reward=reward,
            samples=[sample for trajectory in trajectories for sample in trajectory.samples],
            scores=scores,
            prompt=shorten_messages(task_messages(episode.task.data)),
            completion=shorten_messages(list(_completion(traces))),
            num_turns=sum(trace.num_turns for trace in traces),
            ran_out_of_context=any(trace.stop_condition == OUT_OF_CONTEXT for trace in traces),
            is_cut=self.is_plain and any(call.finish_reason == "length" for trace in traces for call in trace.calls),
            counted_tokens=usage.completion_tokens if self.is_plain and usage else 0,
            generation_s=sum(trace.timing.agent.duration for trace in traces),
            scoring_s=sum(trace.timing.scoring.duration for trace in traces),
        )

    def _trajectory(self, trace: Trace) -> Trajectory:
        """Return the samples of one agent's conversation.

        Its branches share what they share: a turn is trained on once, in the first sample that has it.
        """
        sampling = trace.agent.config.sampling
        temperature = sampling.temperature if sampling is not None else None
        return to_samples(
            list(self._turns_of(trace)), temperature=1.0 if temperature is None else temperature, strategy=self.strategy
        )

    def _turns_of(self, trace: Trace) -> Iterator[Turn]:
        """Yield the turns on branches that count, in the order they were sampled. Text that nobody sampled has no turn."""
        branches: list[Any] = trace.branches  # pyright reads the fields of verifiers 0.3.1
        kept = {id(node) for branch in branches if branch.trainable for node in branch.nodes}
        for node in trace.nodes:
            if node.sampled and id(node) in kept:
                turn = self.turns.find(trace.id, node.message)
                if turn is not None:
                    yield turn


def incomplete(episode: Episode) -> RolloutFailed:
    """Return the failure of an episode that has no valid result: its first error of infrastructure, else its first error."""
    errors: list[Any] = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    has_sampled = any(trace.num_turns for trace in episode.traces)

    def is_infrastructure(error: Any) -> bool:
        """Return whether the policy is not the cause of `error`. An episode that has used up its time is its own doing."""
        is_deadline = error in episode.errors and getattr(episode, "is_timeout", False)
        status = getattr(error, "status_code", None)
        return not is_deadline and names_infrastructure([error.type], status_code=status, has_sampled=has_sampled)

    found = next(filter(is_infrastructure, errors), None)
    first = found or next(iter(errors), None)
    if first is None:
        return RolloutFailed("the episode is not complete, and gives no reason")
    return RolloutFailed(cut(f"{first.type}: {first.message}"), kind=first.type, is_infrastructure=found is not None)


def read_reward(trace: Trace, *, env: str) -> float:
    """Return the reward of a scored trace.

    Raises:
        RolloutFailed: a reward function did not run to its end, or the reward is no number that can be trained on.
    """
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing:
        raise RolloutFailed(
            f"reward function {missing[0]} of environment {env!r} did not run to its end: {trace.stop_condition}",
            kind="RewardMissing",
        )
    return require_reward(trace.reward, env=env, values=read_values(trace))


def read_values(trace: Trace) -> dict[str, float]:
    """Return the value of each reward function and metric of a trace by its name."""
    return measured({name: None if reward is None else reward.score for name, reward in trace.rewards.items()} | trace.metrics)


def task_messages(data: TaskData) -> list[dict[str, Any]]:
    """Return the messages that a task starts with, in the OpenAI chat form."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if data.prompt is None:
        return system
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(message) for message in data.prompt)]


def _completion(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    """Yield what was said after the prompt on each trace's last branch; with several agents, under the agent's name."""
    for trace in traces:
        nodes = trace.branches[-1].nodes if trace.nodes else []
        first = next((index for index, node in enumerate(nodes) if node.sampled), len(nodes))
        for node in nodes[first:]:
            message = message_to_wire(node.message)
            yield message if len(traces) == 1 else {**message, "name": trace.agent.name}


def _scores(episode: Episode) -> dict[str, float]:
    """Return every reward and metric by its name; with several agents, the mean over each agent's traces, under its name."""
    values: dict[str, list[float]] = {}
    for trace in episode.traces:
        prefix = f"{trace.agent.name}/" if len(episode.traces) > 1 else ""
        named = read_values(trace) | (measured({"reward": trace.reward}) if prefix else {})
        for name, value in named.items():
            values.setdefault(f"{prefix}{name}", []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}
