"""Makes a rollout of a finished episode, and scores recorded rollouts with the reward functions of a v1 task.

An episode has a trace for each agent: a graph with a node for each message. The sampled messages become samples, and the rewards of
the traces one reward. Only the messages of a recorded episode were saved. So a new trace is made of them to score it; nothing is
sampled, and no runtime is started. This is not possible for an environment of several agents, or for a reward function that needs
the runtime of the episode.
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

from trivet.environments.apis.groups import is_infrastructure_type
from trivet.environments.apis.messages import cut, describe, require_same_prompt, shorten_messages
from trivet.environments.apis.rewards import add_score, collect_reward_errors, drop_unmeasured, require_reward
from trivet.environments.apis.turns import Turn, to_samples
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation
from trivet.wire.rollouts import Rollout, Sample
from trivet.wire.workers import HostSettings

OUT_OF_CONTEXT = "context_length"
"""The stop condition of a trace whose next prompt is longer than the model's context."""
_NOT_SUPPORTED = "NotSupported"
"""The kind of the failure to score a recorded rollout."""

FindTurn = Callable[[str, Any], Turn | None]
"""Returns the turn that sampled a message, given the trace's id and the message; None for a message that was not sampled."""


def to_rollout(episode: Episode, index: int, *, settings: HostSettings, find_turn: FindTurn) -> Rollout:
    """Return the episode as rollout `index` of its group.

    With several agents, the reward is the mean over the agents that are trained, and each agent's own reward is a score.
    """
    is_plain, strategy = settings.is_plain, settings.trajectory_strategy
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    traces = trained or episode.traces
    reward = math.fsum(_read_reward(trace, env=settings.name) for trace in traces) / len(traces)
    samples: list[Sample] = []
    num_broken_prefixes = num_turns = 0
    for trace in [] if is_plain else trained:
        # Branches of a trace share nodes. Iterating over the trace's nodes uses each turn once, so it is trained on once.
        branches: list[Any] = trace.branches  # pyright reads the fields of verifiers 0.3.1
        trainable_nodes = {id(node) for branch in branches if branch.trainable for node in branch.nodes}
        turns = [find_turn(trace.id, node.message) for node in trace.nodes if node.sampled and id(node) in trainable_nodes]
        sampling = trace.agent.config.sampling
        trace_samples, num_broken = to_samples(
            [turn for turn in turns if turn is not None],  # a message that an environment has rewritten has no turn
            temperature=sampling.temperature if sampling is not None else None,
            strategy=strategy,
            first_turn=num_turns,
            agent=trace.agent.name if len(episode.traces) > 1 else "",
        )
        num_turns += max(trace.num_turns, len(turns))
        samples += trace_samples
        num_broken_prefixes += num_broken
    scores = _read_scores(episode, env=settings.name)
    if strategy == "interleaved" and episode.num_turns > 1 and not is_plain:
        add_score(scores, "broken_prefixes", num_broken_prefixes, env=settings.name)
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


def make_failure(episode: Episode) -> RolloutFailed:
    """Return an error for an episode without a valid result: its first error of infrastructure, else its first error."""
    errors: list[Any] = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    has_sampled = any(trace.num_turns for trace in episode.traces)

    def is_infrastructure(error: Any) -> bool:
        # If the episode exceeded its own time limit, infrastructure is not the cause.
        is_deadline = error in episode.errors and getattr(episode, "is_timeout", False)
        status = getattr(error, "status_code", None)
        return not is_deadline and is_infrastructure_type([error.type], status_code=status, has_sampled=has_sampled)

    infrastructure_error = next(filter(is_infrastructure, errors), None)
    error = infrastructure_error or next(iter(errors), None)
    if error is None:
        return RolloutFailed("the episode is not complete, and gives no reason")
    is_retryable = infrastructure_error is not None
    return RolloutFailed(cut(f"{error.type}: {error.message}"), kind=error.type, is_infrastructure=is_retryable)


def _read_reward(trace: Trace, *, env: str) -> float:
    """Return the reward of a scored trace. Raises RolloutFailed if a reward is missing or is no valid number."""
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing:
        raise RolloutFailed(
            f"reward function {missing[0]} of environment {env!r} did not run to its end: {trace.stop_condition}",
            kind="RewardMissing",
        )
    return require_reward(trace.reward, env=env, values=_read_values(trace))


def _read_values(trace: Trace) -> dict[str, float]:
    """Return the value of each reward function and metric of a trace by its name."""
    return drop_unmeasured(
        {name: None if reward is None else reward.score for name, reward in trace.rewards.items()} | trace.metrics
    )


def task_messages(data: TaskData) -> list[dict[str, Any]]:
    """Return the messages that a task starts with, in the OpenAI chat form."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if data.prompt is None:
        return system
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(message) for message in data.prompt)]


def _completion(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return the messages after the prompt on each trace's last branch; with several agents, each with its agent's name."""
    messages: list[dict[str, Any]] = []
    for trace in traces:
        nodes = trace.branches[-1].nodes if trace.nodes else []
        first_sampled = next((index for index, node in enumerate(nodes) if node.sampled), len(nodes))
        agent_name = {} if len(traces) == 1 else {"name": trace.agent.name}
        messages += [{**message_to_wire(node.message), **agent_name} for node in nodes[first_sampled:]]
    return messages


def _read_scores(episode: Episode, *, env: str) -> dict[str, float]:
    """Return every reward and metric by its name.

    With several agents a name begins with the agent's name, the value is the mean over the agent's traces, and the agent's reward
    is a score too.
    """
    values: dict[str, list[float]] = {}
    for trace in episode.traces:
        scores = _read_values(trace)
        agent = ""
        if len(episode.traces) > 1:
            agent = f"{trace.agent.name}/"
            for name, value in drop_unmeasured({"reward": trace.reward}).items():
                add_score(scores, name, value, env=env)
        for name, value in scores.items():
            values.setdefault(f"{agent}{name}", []).append(value)
    return {name: math.fsum(scores) / len(scores) for name, scores in values.items()}


async def rescore(env: Any, task: Any, recorded: Sequence[RecordedConversation], *, name: str) -> list[Rollout]:
    """Score recorded rollouts of `task` with today's reward functions and metrics; `name` is the environment's name.

    Raises:
        RolloutFailed: they cannot be scored.
    """
    library: Any = vf  # pyright reads verifiers 0.3.1
    if not isinstance(env, library.SingleAgentEnv):
        raise RolloutFailed(
            f"environment {name!r} ({type(env).__name__}) plays several agents: "
            "verifiers scores their traces within the episode alone",
            kind=_NOT_SUPPORTED,
        )
    scoring = [(function.__name__, function) for kind in ("metric", "reward") for function in task.hooks(kind)]
    scoring += [(judge.reward_name, judge.score) for judge in task.plugged_judges()]
    runtimes = {function_name: inspect.signature(function).parameters.get("runtime") for function_name, function in scoring}
    needing_runtime = sorted(
        function_name for function_name, runtime in runtimes.items() if runtime and runtime.default is runtime.empty
    )
    if needing_runtime:
        raise RolloutFailed(
            f"reward functions of environment {name!r} need the runtime of the episode, which is gone: "
            f"{', '.join(needing_runtime)}",
            kind=_NOT_SUPPORTED,
        )
    prompt = shorten_messages(task_messages(task.data))
    return [await _rescore(task, prompt, conversation, index=index, name=name) for index, conversation in enumerate(recorded)]


async def _rescore(
    task: Any, prompt: list[dict[str, Any]], recorded: RecordedConversation, *, index: int, name: str
) -> Rollout:
    """Make a trace of a recorded rollout, score it, and return it as rollout `index`. `prompt` is the task's prompt today."""
    require_same_prompt(prompt, recorded)
    library: Any = vf  # pyright reads verifiers 0.3.1
    trace = library.Trace(
        task=library.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=library.AgentInfo(config=library.AgentConfig()),
    )
    messages = [parse_message(message) for message in (*recorded.prompt, *recorded.completion)]
    for position, message in enumerate(messages):
        is_sampled = position >= len(recorded.prompt) and message.role == "assistant"
        trace.nodes.append(MessageNode(parent=position - 1 if position else None, message=message, sampled=is_sampled))
    trace.is_completed = trace.ok = True
    started = time.monotonic()
    with collect_reward_errors(name) as errors:
        try:
            await task.score(trace)
        except Exception as exc:  # user code may raise anything
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
