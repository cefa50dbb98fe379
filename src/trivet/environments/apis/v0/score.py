"""Scores rollouts with the rubric of a v0 environment: rollouts that were just played, and recorded rollouts.

A recorded rollout is not sampled again, and its tools are not called. The state that the rubric gets has the example's fields, the
recorded messages and a trajectory with one step per turn. Other keys that the environment kept in its state during the rollout were
not saved. A reward function that reads such a key raises, and its error names the key.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import verifiers as vf

from trivet.environments.apis.messages import describe, require_same_prompt, shorten_messages
from trivet.environments.apis.rewards import ScoreForm, collect_reward_errors, drop_unmeasured, guard, require_reward
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation
from trivet.wire.rollouts import Rollout


def guard_rewards(env: vf.Environment) -> None:
    """Wrap every reward function of `env`, its sub-rubrics and sub-environments."""
    for rubric in _rubrics(env.rubric):
        rubric.funcs = [
            # verifiers has no public method that tells whether a function scores a group
            guard(function, scores=ScoreForm.GROUP if rubric._is_group_func(function) else ScoreForm.ONE, is_metric=weight == 0)
            for function, weight in zip(rubric.funcs, rubric.weights, strict=False)
        ]


def _rubrics(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    yield rubric
    for inner in [*getattr(rubric, "rubrics", []), *(env.rubric for env in getattr(rubric, "env_map", {}).values())]:
        yield from _rubrics(inner)


async def score_group(env: vf.Environment, states: Sequence[Any], *, name: str, drops_errors: bool) -> float:
    """Score the rollouts of a group together: write `reward` and `metrics` into each state. Return the time it took in seconds.

    Args:
        name: the environment's name, for messages.
        drops_errors: if a reward function raises or returns no valid number, the group fails. False: verifiers counts 0.

    Raises:
        RolloutFailed: the group fails.
    """
    started = time.monotonic()
    with collect_reward_errors(name, num_rollouts=len(states)) as errors:
        try:
            score = env.rubric.score_group if env.score_rollouts else env.rubric.dummy_score_group
            await score(list(states))
        except Exception as exc:  # user code may raise anything
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
    return require_reward(state.get("reward"), env=name, values=metrics), drop_unmeasured(metrics)


def read_turn_rewards(state: Mapping[str, Any], *, name: str) -> list[float]:
    """Return `turn_rewards` of a scored state, one for each step of its trajectory; empty if the environment gives none.

    Raises:
        RolloutFailed: they are not as many as the turns, or one is no valid number.
    """
    rewards, num_turns = state.get("turn_rewards"), len(state["trajectory"])
    if rewards is None:
        return []
    if not isinstance(rewards, Sequence) or len(rewards) != num_turns:
        given = len(rewards) if isinstance(rewards, Sequence) else type(rewards).__name__
        raise RolloutFailed(
            f"turn_rewards in the state of environment {name!r} must be a list of {num_turns} numbers, one per turn, got {given}",
            kind="TurnRewards",
        )
    return [require_reward(reward, env=name, values={}) for reward in rewards]


async def rescore(
    env: vf.Environment,
    example: Mapping[str, Any],
    recorded: Sequence[RecordedConversation],
    *,
    client: Any,
    model_name: str,
    name: str,
) -> list[Rollout]:
    """Return the recorded rollouts of `example` with the scores of today's rubric.

    Args:
        client: put into the states, as verifiers requires; no request is sent.
        name: the environment's name, for messages.
    """
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
                turn_rewards=read_turn_rewards(state, name=name),
                scoring_s=scoring_s,
            )
        )
    return rollouts


async def _make_state(
    env: Any, example: Mapping[str, Any], recorded: RecordedConversation, *, client: Any, model_name: str
) -> dict[str, Any]:
    """Return a verifiers state of the recorded rollout, finished and not scored yet."""
    state = await env.init_state(dict(example), client, model_name, {})
    require_same_prompt(shorten_messages(state["prompt"]), recorded)
    messages: Any = [dict(message) for message in recorded.completion]
    if [message.get("role") for message in messages] == ["text"]:
        messages = messages[0]["content"]  # the role "text" marks a text completion, which the environment had as a string
    # `init_state` converts a prompt into the form that rubrics read. A second call converts the completion in the same way.
    answered = await env.init_state({**example, "prompt": messages}, client, model_name, {})
    prompt, completion = state["prompt"], answered["prompt"]
    state["completion"], state["is_completed"], state["is_truncated"] = completion, True, recorded.is_truncated
    # The trajectory has a step for each message of the model, without its response and tokens, which were not saved.
    unsaved_fields = dict.fromkeys(("response", "tokens", "reward", "advantage"))
    state["trajectory"] = [
        {
            **unsaved_fields,
            "prompt": [*prompt, *completion[:index]],
            "completion": [message],
            "is_truncated": recorded.is_truncated and index == len(completion) - 1,
            "trajectory_id": "recorded",
            "extras": {},
        }
        for index, message in enumerate([] if isinstance(completion, str) else completion)
        if (message.get("role") if isinstance(message, dict) else getattr(message, "role", None)) == "assistant"
    ]
    return state
