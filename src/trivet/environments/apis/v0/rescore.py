"""Scores recorded rollouts with the rubric of a v0 environment: nothing is sampled, and no tool is called.

The state that the rubric gets holds the example's fields, the recorded messages and a trajectory with one step per turn. What the
environment itself kept in its state during the rollout was not saved: a reward function that reads it raises, and its error names
the key.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf

from trivet.environments.apis.messages import shorten_messages
from trivet.environments.apis.rescoring import require_same_prompt
from trivet.environments.apis.v0.rubrics import read_scores, score_group
from trivet.errors import RolloutFailed
from trivet.wire.groups import RecordedConversation
from trivet.wire.rollouts import Rollout


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
        client: what a rollout's state holds as its client; it is not asked.
        name: the environment's, for errors.

    Raises:
        RolloutFailed: the prompt of the example has changed, a reward function raised, or the release of verifiers is too old.
    """
    if not hasattr(env, "init_state"):
        raise RolloutFailed(
            f"environment {name!r} runs with a release of verifiers before 0.1.8, which scores a rollout only where it is "
            "sampled; update verifiers in its virtual environment",
            kind="NotSupported",
        )
    states = [await _make_state(env, example, one, client=client, model_name=model_name) for one in recorded]
    scoring_s = await score_group(env, states, name=name, drops_errors=True)
    rollouts: list[Rollout] = []
    for index, (state, one) in enumerate(zip(states, recorded, strict=True)):
        reward, scores = read_scores(state, name=name)
        rollouts.append(
            Rollout(
                index=index,
                reward=reward,
                scores=scores,
                prompt=one.prompt,
                completion=one.completion,
                num_turns=len(state["trajectory"]),
                scoring_s=scoring_s,
            )
        )
    return rollouts


async def _make_state(
    env: Any, example: Mapping[str, Any], recorded: RecordedConversation, *, client: Any, model_name: str
) -> dict[str, Any]:
    """Return the state of a finished rollout, before it is scored.

    Raises:
        RolloutFailed: the prompt of the example has changed.
    """
    state = await env.init_state(dict(example), client, model_name, {})
    require_same_prompt(shorten_messages(state["prompt"]), recorded)
    # `init_state` brings messages into the form that this release's rubrics read, those of the completion too.
    answered = await env.init_state({**example, "prompt": _native(recorded.completion)}, client, model_name, {})
    prompt, completion = state["prompt"], answered["prompt"]
    state["completion"] = completion
    state["is_completed"], state["is_truncated"] = True, recorded.is_truncated
    state["trajectory"] = [] if isinstance(completion, str) else _steps(list(prompt), list(completion), recorded.is_truncated)
    return state


def _native(messages: Sequence[dict[str, Any]]) -> Any:
    """Return the messages as the environment had them: those of a text completion were one text."""
    if [message.get("role") for message in messages] == ["text"]:
        return messages[0]["content"]
    return [dict(message) for message in messages]


def _steps(prompt: list[Any], completion: list[Any], is_truncated: bool) -> list[dict[str, Any]]:
    """Return a step for each message of the model, without its response and tokens, which were not saved."""
    return [
        {
            "prompt": [*prompt, *completion[:place]],
            "completion": [message],
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": is_truncated and place == len(completion) - 1,
            "trajectory_id": "recorded",
            "extras": {},
        }
        for place, message in enumerate(completion)
        if _role(message) == "assistant"
    ]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
