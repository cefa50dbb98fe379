"""Plays one rollout of an environment and reads what it left, in the form of each release that has the v0 API."""

import inspect
import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import verifiers as vf

from trivet.environments.apis.v0.turns import is_answer


async def play(
    env: vf.Environment, example: Mapping[str, Any], *, client: Any, model_name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Play one rollout; return its state, which is not scored yet.

    Args:
        example: a record of the environment's data set, with `prompt`.
        client: what the installed release calls: see `model_client` and `openai_client`.
        arguments: of each request. The environment may change the dictionary.

    Raises:
        Exception: what the rollout failed with.
    """
    if "input" in inspect.signature(env.rollout).parameters:  # since 0.1.8
        state: Any = await env.rollout(cast("Any", dict(example)), client, model_name, arguments)
    else:
        state = await _play_with_fields(env, example, client=client, model_name=model_name, arguments=arguments)
    error = state.get("error")
    if error is not None:
        cause = error.__cause__ if isinstance(error, BaseException) and error.__cause__ else error
        raise cause if isinstance(cause, BaseException) else RuntimeError(str(cause))
    return state


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
