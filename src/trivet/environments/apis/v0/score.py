"""Scores rollouts with the rubric of a v0 environment: those that were just played, and recorded ones.

A recorded rollout is neither sampled again nor are its tools called. The state that the rubric gets holds the example's fields, the
recorded messages and a trajectory with one step per turn. What the environment itself kept in its state during the rollout was not
saved: a reward function that reads it raises, and its error names the key.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import verifiers as vf

from trivet.environments.apis.messages import describe, require_same_prompt, shorten_messages
from trivet.environments.apis.rewards import Scores, collect_reward_errors, guard, measured, require_reward
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation
from trivet.wire.rollouts import Rollout


def guard_rewards(env: vf.Environment) -> None:
    """Wrap every reward function of `env`, its sub-rubrics and sub-environments."""
    for rubric in _rubrics(env.rubric):
        rubric.funcs = [
            # verifiers has no public name for the kind of a function
            guard(function, scores=Scores.GROUP if rubric._is_group_func(function) else Scores.ONE, is_metric=weight == 0)
            for function, weight in zip(rubric.funcs, rubric.weights, strict=False)
        ]


def _rubrics(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    yield rubric
    for inner in [*getattr(rubric, "rubrics", []), *(env.rubric for env in getattr(rubric, "env_map", {}).values())]:
        yield from _rubrics(inner)


async def score_group(env: vf.Environment, states: Sequence[Any], *, name: str, drops_errors: bool) -> float:
    """Score the rollouts of a group together: write `reward` and `metrics` into each state. Return the seconds it took.

    Args:
        drops_errors: a reward function that raises or returns no reward fails the group; otherwise verifiers counts 0.
    """
    started = time.monotonic()
    with collect_reward_errors(name, num_rollouts=len(states)) as errors:
        try:
            score = env.rubric.score_group if env.score_rollouts else env.rubric.dummy_score_group
            await score(list(states))
        except Exception as exc:  # the user's code
            raise RolloutFailed(f"scoring failed: {describe(exc)}", kind=type(exc).__name__) from exc
        finally:
            for state in states:
                await env.rubric.cleanup(state)
    if errors and drops_errors:
        raise errors[0]
    return time.monotonic() - started


def read_scores(state: Mapping[str, Any], *, name: str) -> tuple[float, dict[str, float]]:
    """Return the reward of a scored state, and the value of each reward function and metric by its name."""
    metrics: dict[str, Any] = state.get("metrics") or {}
    return require_reward(state.get("reward"), env=name, values=metrics), measured(metrics)


async def rescore(
    env: vf.Environment,
    example: Mapping[str, Any],
    recorded: Sequence[RecordedConversation],
    *,
    client: Any,
    model_name: str,
    name: str,
) -> list[Rollout]:
    """Return the recorded rollouts of `example` with the scores of today's rubric. `client` is not asked."""
    states = [await _make_state(env, example, conversation, client=client, model_name=model_name) for conversation in recorded]
    scoring_s = await score_group(env, states, name=name, drops_errors=True)
    rollouts: list[Rollout] = []
    for index, (state, conversation) in enumerate(zip(states, recorded, strict=True)):
        reward, scores = read_scores(state, name=name)
        rollouts.append(
            Rollout(
                index=index,
                reward=reward,
                scores=scores,
                prompt=conversation.prompt,
                completion=conversation.completion,
                num_turns=len(state["trajectory"]),
                scoring_s=scoring_s,
            )
        )
    return rollouts


async def _make_state(
    env: Any, example: Mapping[str, Any], recorded: RecordedConversation, *, client: Any, model_name: str
) -> dict[str, Any]:
    """Return the state of a finished rollout, before it is scored."""
    state = await env.init_state(dict(example), client, model_name, {})
    require_same_prompt(shorten_messages(state["prompt"]), recorded)
    messages: Any = [dict(message) for message in recorded.completion]
    if [message.get("role") for message in messages] == ["text"]:
        messages = messages[0]["content"]  # of a text completion, which the environment had as one text
    # `init_state` brings messages into the form that rubrics read, those of the completion too.
    answered = await env.init_state({**example, "prompt": messages}, client, model_name, {})
    prompt, completion = state["prompt"], answered["prompt"]
    state["completion"], state["is_completed"], state["is_truncated"] = completion, True, recorded.is_truncated
    # A step for each message of the model, without its response and tokens, which were not saved.
    unsaved = dict.fromkeys(("response", "tokens", "reward", "advantage"))
    state["trajectory"] = [
        {
            **unsaved,
            "prompt": [*prompt, *completion[:place]],
            "completion": [message],
            "is_truncated": recorded.is_truncated and place == len(completion) - 1,
            "trajectory_id": "recorded",
            "extras": {},
        }
        for place, message in enumerate([] if isinstance(completion, str) else completion)
        if (message.get("role") if isinstance(message, dict) else getattr(message, "role", None)) == "assistant"
    ]
    return state
