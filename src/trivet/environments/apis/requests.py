"""Translates the sampling parameters of a group into the arguments of one request. Pure."""

from collections.abc import Mapping
from typing import Any

from trivet.algorithms.seeds import derive_seed
from trivet.wire.groups import SamplingArguments
from trivet.wire.rollouts import GroupId

_OPENAI = ("max_tokens", "top_p", "presence_penalty", "frequency_penalty")
"""Fields that the OpenAI client knows; every other travels in `extra_body`."""
SAMPLING_DEFAULTS: Mapping[str, Any] = {
    "max_tokens": None,
    "min_tokens": 0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Values that change nothing, by the name of the field: the defaults of the sampling section. A test compares them with it."""


def rollout_seed(sampling: SamplingArguments, *, group_id: GroupId, index: int) -> int | None:
    """Return the seed of one rollout's first request; None when sampling is not to be reproducible."""
    return None if sampling.seed is None else derive_seed(sampling.seed, group_id, index) % 2**31


def trace_seed(seed: int, number: int) -> int:
    """Return the seed of one agent's conversation in a rollout that has several.

    Args:
        number: number of conversations before it; 0 returns `seed`.
    """
    return derive_seed(seed, "trace", number) % 2**31 if number else seed


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a later turn. With one seed for all turns, each turn would draw the same random numbers.

    Args:
        turn: number of turns before it; 0 returns `seed`.
    """
    return derive_seed(seed, "turn", turn) % 2**31 if turn else seed


def request_arguments(sampling: SamplingArguments, *, seed: int | None) -> dict[str, Any]:
    """Return the arguments of one chat-completions request to a trivet server, in the form that verifiers passes on.

    Args:
        seed: this request's own.
    """
    return {
        "temperature": sampling.temperature,
        "seed": seed,
        "logprobs": True,
        **{name: sampling.fields[name] for name in _OPENAI if name in sampling.fields},
        "extra_body": {
            **{name: value for name, value in sampling.fields.items() if name not in _OPENAI},
            "return_token_ids": True,
        },
    }


def plain_arguments(sampling: SamplingArguments, *, seed: int | None) -> dict[str, Any]:
    """Return the arguments of one chat-completions request to any other OpenAI-compatible server.

    Only values that differ from their default are sent: such a server may refuse fields that it does not know.
    """
    fields = {name: value for name, value in sampling.fields.items() if value != SAMPLING_DEFAULTS.get(name)}
    known = {name: fields.pop(name) for name in _OPENAI if name in fields}
    asked = {"temperature": sampling.temperature, "seed": seed, **known, "extra_body": fields or None}
    return {name: value for name, value in asked.items() if value is not None}
