"""Translates the sampling configuration into what a group carries, and that into the arguments of one request. Pure."""

from typing import Any

from trivet.config.sections.sampling import RequestSamplingConfig
from trivet.wire.groups import SamplingArguments

_OPENAI = ("max_tokens", "top_p", "presence_penalty", "frequency_penalty")
"""Fields that the OpenAI client knows; every other travels in `extra_body`."""
_DEFAULTS = RequestSamplingConfig().model_dump()


def sampling_arguments(sampling: RequestSamplingConfig, *, temperature: float | None) -> SamplingArguments:
    """Return what a group carries of its sampling configuration.

    Args:
        temperature: the one in force when the group starts; None leaves it to the server.
    """
    return SamplingArguments(
        temperature=temperature,
        seed=sampling.seed,
        fields={
            "max_tokens": sampling.max_tokens,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": sampling.min_tokens,
            **sampling.extra_body,
        },
    )


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
    fields = {name: value for name, value in sampling.fields.items() if value != _DEFAULTS.get(name)}
    known = {name: fields.pop(name) for name in _OPENAI if name in fields}
    asked = {"temperature": sampling.temperature, "seed": seed, **known, "extra_body": fields or None}
    return {name: value for name, value in asked.items() if value is not None}
