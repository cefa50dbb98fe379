"""Makes a rollout of a finished episode, and scores recorded rollouts with the reward functions of a v1 task.

The sampled message nodes of an episode's traces become samples, its rewards one reward. Of a recorded episode only the messages
were saved, so a new trace is made of them, a node for each message; nothing is sampled, and no runtime is started. A function
that needs the runtime of the episode, and an environment of several agents, cannot be scored so.
"""

import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import Episode, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire, parse_message
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls

from trivet.environments.apis.groups import names_infrastructure
from trivet.environments.apis.messages import cut, describe, require_same_prompt, shorten_messages
from trivet.environments.apis.rewards import collect_reward_errors, measured, require_reward
from trivet.environments.apis.turns import Turn, to_samples
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation
from trivet.wire.rollouts import Rollout, Sample
from trivet.wire.workers import HostSettings

OUT_OF_CONTEXT = "context_length"
"""The stop condition of a trace whose next prompt is longer than the model's context."""
_NOT_SUPPORTED = "NotSupported"

FindTurn = Callable[[str, Any], Turn | None]
"""Returns the turn that sampled a message of a trace, given the trace's id; None when none did."""


def to_rollout(episode: Episode, index: int, *, settings: HostSettings, find_turn: FindTurn) -> Rollout:
    """Return the episode as rollout `index` of its group.

    With several agents, the reward is the mean over the agents that are trained; each agent's own is a score.
    """
    is_plain, strategy = settings.is_plain, settings.trajectory_strategy
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    traces = trained or episode.traces
    reward = math.fsum(_read_reward(trace, env=settings.name) for trace in traces) / len(traces)
    samples: list[Sample] = []
    num_broken_prefixes = 0
    for trace in [] if is_plain else trained:
        # A turn is trained on once, in the first sample that has it: branches share what they share.
        branches: list[Any] = trace.branches  # pyright reads the fields of verifiers 0.3.1
        kept = {id(node) for branch in branches if branch.trainable for node in branch.nodes}
        found = [find_turn(trace.id, node.message) for node in trace.nodes if node.sampled and id(node) in kept]
        sampling = trace.agent.config.sampling
        made, num_broken = to_samples(
            [turn for turn in found if turn is not None],  # text that nobody sampled has no turn
            temperature=sampling.temperature if sampling is not None else None,
            strategy=strategy,
        )
        samples += made
        num_broken_prefixes += num_broken
    scores = _scores(episode)
    if strategy == "interleaved" and episode.num_turns > 1 and not is_plain:
        scores["broken_prefixes"] = float(num_broken_prefixes)
    usage = episode.usage
    return Rollout(
        index=index,
        reward=reward,
        samples=samples,
        scores=scores,
        prompt=shorten_messages(task_messages(episode.task.data)),
        completion=shorten_messages(_completion(traces)),
        num_turns=sum(trace.num_turns for trace in traces),
        ran_out_of_context=any(trace.stop_condition == OUT_OF_CONTEXT for trace in traces),
        is_cut=is_plain and any(call.finish_reason == "length" for trace in traces for call in trace.calls),
        counted_tokens=usage.completion_tokens if is_plain and usage else 0,
        generation_s=sum(trace.timing.agent.duration for trace in traces),
        scoring_s=sum(trace.timing.scoring.duration for trace in traces),
    )


def incomplete(episode: Episode) -> RolloutFailed:
    """Return the failure of an episode that has no valid result: its first error of infrastructure, else its first error."""
    errors: list[Any] = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    has_sampled = any(trace.num_turns for trace in episode.traces)

    def is_infrastructure(error: Any) -> bool:
        # An episode that has used up its time is its own doing.
        is_deadline = error in episode.errors and getattr(episode, "is_timeout", False)
        status = getattr(error, "status_code", None)
        return not is_deadline and names_infrastructure([error.type], status_code=status, has_sampled=has_sampled)

    found = next(filter(is_infrastructure, errors), None)
    first = found or next(iter(errors), None)
    if first is None:
        return RolloutFailed("the episode is not complete, and gives no reason")
    return RolloutFailed(cut(f"{first.type}: {first.message}"), kind=first.type, is_infrastructure=found is not None)


def _read_reward(trace: Trace, *, env: str) -> float:
    """Return the reward of a scored trace. Raises RolloutFailed for one that is missing, or that cannot be trained on."""
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing:
        raise RolloutFailed(
            f"reward function {missing[0]} of environment {env!r} did not run to its end: {trace.stop_condition}",
            kind="RewardMissing",
        )
    return require_reward(trace.reward, env=env, values=_read_values(trace))


def _read_values(trace: Trace) -> dict[str, float]:
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


def _completion(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return what was said after the prompt on each trace's last branch; with several agents, under the agent's name."""
    messages: list[dict[str, Any]] = []
    for trace in traces:
        nodes = trace.branches[-1].nodes if trace.nodes else []
        first = next((index for index, node in enumerate(nodes) if node.sampled), len(nodes))
        named = {} if len(traces) == 1 else {"name": trace.agent.name}
        messages += [{**message_to_wire(node.message), **named} for node in nodes[first:]]
    return messages


def _scores(episode: Episode) -> dict[str, float]:
    """Return every reward and metric by its name; with several agents, the mean over each agent's traces, under its name."""
    values: dict[str, list[float]] = {}
    for trace in episode.traces:
        prefix = f"{trace.agent.name}/" if len(episode.traces) > 1 else ""
        for name, value in (_read_values(trace) | (measured({"reward": trace.reward}) if prefix else {})).items():
            values.setdefault(f"{prefix}{name}", []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}


async def rescore(env: Any, task: Any, recorded: Sequence[RecordedConversation], *, name: str) -> list[Rollout]:
    """Return the recorded rollouts of `task`, of environment `name`, with the scores of its functions and metrics today."""
    kinds: Any = vf
    if not isinstance(env, kinds.SingleAgentEnv):
        raise RolloutFailed(
            f"environment {name!r} ({type(env).__name__}) plays several agents: "
            "verifiers scores their traces within the episode alone",
            kind=_NOT_SUPPORTED,
        )
    scoring = [(function.__name__, function) for kind in ("metric", "reward") for function in task.hooks(kind)]
    scoring += [(judge.reward_name, judge.score) for judge in task.plugged_judges()]
    runtimes = {named: inspect.signature(function).parameters.get("runtime") for named, function in scoring}
    if needy := sorted(named for named, runtime in runtimes.items() if runtime and runtime.default is runtime.empty):
        raise RolloutFailed(
            f"reward functions of environment {name!r} need the runtime of the episode, which is gone: {', '.join(needy)}",
            kind=_NOT_SUPPORTED,
        )
    prompt = shorten_messages(task_messages(task.data))
    return [await _rescore(task, prompt, conversation, index=index, name=name) for index, conversation in enumerate(recorded)]


async def _rescore(
    task: Any, prompt: list[dict[str, Any]], recorded: RecordedConversation, *, index: int, name: str
) -> Rollout:
    require_same_prompt(prompt, recorded)
    kinds: Any = vf
    trace = kinds.Trace(
        task=kinds.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=kinds.AgentInfo(config=kinds.AgentConfig()),
    )
    messages = [parse_message(message) for message in (*recorded.prompt, *recorded.completion)]
    for place, message in enumerate(messages):  # those of the model are the assistant's after the prompt
        is_sampled = place >= len(recorded.prompt) and message.role == "assistant"
        trace.nodes.append(MessageNode(parent=place - 1 if place else None, message=message, sampled=is_sampled))
    trace.is_completed = trace.ok = True
    started = time.monotonic()
    with collect_reward_errors(name) as errors:
        try:
            await task.score(trace)
        except Exception as exc:  # the user's code
            failure = RolloutFailed(f"scoring failed: {describe(exc)}", kind=type(exc).__name__)
            raise (errors[0] if errors else failure) from exc
    return Rollout(
        index=index,
        reward=_read_reward(trace, env=name),
        scores=_read_values(trace),
        prompt=recorded.prompt,
        completion=recorded.completion,
        num_turns=sum(message.get("role") == "assistant" for message in recorded.completion),
        scoring_s=time.monotonic() - started,
    )
