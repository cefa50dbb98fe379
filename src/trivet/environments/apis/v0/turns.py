"""Reads the tokens of a model's answer, in the form of each release that has the v0 API."""

from typing import Any

from trivet.environments.apis.answers import make_turn, read_turn
from trivet.environments.apis.trajectories import Turn

_OVERLONG = "overlong-prompt"
"""Id of the answer that verifiers makes up, until 0.1.10, when a server refuses a prompt that is longer than its context."""


def is_answer(response: Any) -> bool:
    """Return whether a server gave `response`: verifiers did not make it up."""
    return getattr(response, "id", None) != _OVERLONG


def to_turn(response: Any, *, is_truncated: bool = False) -> Turn:
    """Return the tokens of one response, as a turn to train on.

    Args:
        response: verifiers' own type since 0.1.11, the OpenAI client's before.
        is_truncated: the environment says that a length limit ended the turn.

    Raises:
        RolloutFailed: the server's answer lacks token ids or the policy of each token.
    """
    if is_openai(response):
        return read_turn(response.model_dump())
    tokens = response.message.tokens
    return make_turn(
        prompt_ids=tokens and tokens.prompt_ids,
        completion_ids=tokens and tokens.completion_ids,
        logprobs=tokens.completion_logprobs if tokens else [],
        policy_versions=response.get("policy_versions"),
        is_truncated=is_truncated or bool(response.message.is_truncated),
    )


def is_openai(response: Any) -> bool:
    """Return whether `response` is the OpenAI client's, not verifiers' own."""
    return hasattr(response, "choices")


def is_cut(response: Any) -> bool:
    """Return whether a length limit ended the answer."""
    if is_openai(response):
        return response.choices[0].finish_reason == "length"
    return bool(response.message.is_truncated)


def counted_tokens(response: Any) -> int:
    """Return the number of sampled tokens, as the server counts them; 0 where it does not."""
    return response.usage.completion_tokens if response.usage else 0
