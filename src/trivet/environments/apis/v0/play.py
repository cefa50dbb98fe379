"""Plays one rollout of an environment and reads what it left, in the form of each release that has the v0 API."""

import inspect
import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import verifiers as vf

from trivet.environments.apis.causes import is_infrastructure
from trivet.environments.apis.messages import describe
from trivet.environments.apis.v0.turns import is_answer
from trivet.errors import RolloutFailed

_TOOL_ERROR = "ToolError"
"""verifiers' type, since 0.1.8, of a call that broke a tool whose environment ends the rollout on such errors."""


async def play(
    env: vf.Environment, example: Mapping[str, Any], *, client: Any, model_name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Play one rollout; return its state, which is not scored yet.

    Args:
        example: a record of the environment's data set, with `prompt`.
        client: what the installed release calls: see `model_client` and `openai_client`.
        arguments: of each request. The environment may change the dictionary.

    A rollout that a call of the policy to a tool has ended is complete: it is scored like any other, as verifiers scores it.

    Raises:
        RolloutFailed: verifiers ended the rollout with another error.
        Exception: what the environment raised.
    """
    if "input" in inspect.signature(env.rollout).parameters:  # since 0.1.8
        state: Any = await env.rollout(cast("Any", dict(example)), client, model_name, arguments)
    else:
        state = await _play_with_fields(env, example, client=client, model_name=model_name, arguments=arguments)
    error = state.get("error")
    if error is None or error_of_policy(state):
        return state
    error = error if isinstance(error, BaseException) else RuntimeError(str(error))
    cause = error.__cause__ or error
    is_retryable = is_infrastructure(error, has_sampled=bool(steps_of(state)))
    raise RolloutFailed(describe(cause), kind=type(cause).__name__, is_infrastructure=is_retryable) from error


def error_of_policy(state: Mapping[str, Any]) -> str:
    """Return the type of the error by which the policy's own call to a tool has ended the rollout; empty when none has."""
    error: Any = state.get("error")
    is_from_tool = any(base.__name__ == _TOOL_ERROR for base in type(error).__mro__)
    return type(error).__name__ if is_from_tool and steps_of(state) and not is_infrastructure(error) else ""


async def _play_with_fields(
    env: Any, example: Mapping[str, Any], *, client: Any, model_name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Call a rollout of 0.1.2 to 0.1.7, which takes the fields of the example one by one, and tools with its `info`."""
    info = example.get("info") or {}
    info = json.loads(info) if isinstance(info, str) else deepcopy(info)
    if getattr(env, "oai_tools", None):
        info.setdefault("oai_tools", env.oai_tools)
    fields = {"answer": example.get("answer") or "", "task": example.get("task") or "default", "info": info}
    if "example_id" in inspect.signature(env.rollout).parameters and example.get("example_id") is not None:
        fields["example_id"] = example["example_id"]
    prompt = deepcopy(example["prompt"])
    completion, state = await env.rollout(client, model_name, prompt=prompt, sampling_args=arguments, **fields)
    return {**fields, **state, "prompt": example["prompt"], "completion": completion}


def steps_of(state: Mapping[str, Any]) -> list[tuple[Any, bool]]:
    """Return the answers of a rollout's turns, in order, each with whether the environment says that a length limit ended it."""
    if "trajectory" in state:  # since 0.1.8
        steps = [(step["response"], bool(step.get("is_truncated"))) for step in state["trajectory"]]
    else:
        steps = [(response, False) for response in state["responses"]]
    return [(response, is_truncated) for response, is_truncated in steps if is_answer(response)]
