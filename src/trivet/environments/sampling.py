"""Translates the sampling configuration into what a group carries. Pure; `apis.requests` makes a request of that."""

from trivet.config.schema.environment import RequestSamplingConfig
from trivet.wire.groups import SamplingArguments


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
