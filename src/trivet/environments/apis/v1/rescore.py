"""Scores recorded rollouts with the reward functions of a v1 task: nothing is sampled, and no runtime is started.

verifiers scores the trace of an episode. What was saved of it are its messages, so a new trace is made of them, a node for each
message. A reward function that needs the runtime of the episode, and an environment of several agents, cannot be scored so.
"""

import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import parse_message
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls

from trivet.environments.apis.messages import describe, shorten_messages
from trivet.environments.apis.rescoring import require_same_prompt
from trivet.environments.apis.reward_guard import collect_reward_errors, failed_reward
from trivet.environments.apis.v1.episodes import read_reward, read_values, task_messages
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation
from trivet.wire.rollouts import Rollout

_NOT_SUPPORTED = "NotSupported"


async def rescore(env: Any, task: Any, recorded: Sequence[RecordedConversation], *, name: str) -> list[Rollout]:
    """Return the recorded rollouts of `task` with the scores of its reward functions and metrics today.

    Args:
        name: the environment's, for errors.

    Raises:
        RolloutFailed: the prompt has changed, the rollouts cannot be scored outside their episode, or a reward function raised.
    """
    _require_scorable(env, task, name=name)
    prompt = shorten_messages(task_messages(task.data))
    return [await _rescore(task, prompt, conversation, index=index, name=name) for index, conversation in enumerate(recorded)]


def _require_scorable(env: Any, task: Any, *, name: str) -> None:
    """Refuse an environment whose scores depend on more than the messages."""
    kinds: Any = vf
    if not isinstance(env, kinds.SingleAgentEnv):
        raise RolloutFailed(
            f"environment {name!r} ({type(env).__name__}) plays several agents: "
            "verifiers scores their traces within the episode alone",
            kind=_NOT_SUPPORTED,
        )
    if needy := sorted(_functions_with_runtime(task)):
        raise RolloutFailed(
            f"reward functions of environment {name!r} need the runtime of the episode, which is gone: {', '.join(needy)}",
            kind=_NOT_SUPPORTED,
        )


def _functions_with_runtime(task: Any) -> Iterator[str]:
    """Yield the names of reward functions, metrics and judges that have a `runtime` parameter without a default."""
    named = [(function.__name__, function) for kind in ("metric", "reward") for function in task.hooks(kind)]
    for name, function in (*named, *((judge.reward_name, judge.score) for judge in task.plugged_judges())):
        parameter = inspect.signature(function).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            yield name


async def _rescore(
    task: Any, prompt: list[dict[str, Any]], recorded: RecordedConversation, *, index: int, name: str
) -> Rollout:
    require_same_prompt(prompt, recorded)
    trace = _make_trace(task, recorded)
    started = time.monotonic()
    with collect_reward_errors() as errors:
        try:
            await task.score(trace)
        except Exception as exc:  # the user's code
            raise (
                failed_reward(errors[0], env=name)
                if errors
                else RolloutFailed(f"scoring failed: {describe(exc)}", kind=type(exc).__name__)
            ) from exc
    reward = read_reward(trace, env=name)
    return Rollout(
        index=index,
        reward=reward,
        scores=read_values(trace),
        prompt=recorded.prompt,
        completion=recorded.completion,
        num_turns=sum(message.get("role") == "assistant" for message in recorded.completion),
        scoring_s=time.monotonic() - started,
    )


def _make_trace(task: Any, recorded: RecordedConversation) -> Any:
    """Return a finished trace of the recorded messages; those of the model are the assistant's after the prompt."""
    kinds: Any = vf
    trace = kinds.Trace(
        task=kinds.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=kinds.AgentInfo(config=kinds.AgentConfig()),
    )
    messages = [parse_message(message) for message in (*recorded.prompt, *recorded.completion)]
    trace.nodes = [
        MessageNode(
            parent=place - 1 if place else None,
            message=message,
            sampled=place >= len(recorded.prompt) and message.role == "assistant",
        )
        for place, message in enumerate(messages)
    ]
    trace.is_completed = trace.ok = True
    return trace
