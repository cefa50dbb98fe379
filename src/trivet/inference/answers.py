"""Adds `policy_versions` to vLLM's answers: one [version, length] per run of sampled tokens, in order.

Complete answers of chat completions and of token-in, token-out have it; streamed ones, and those of beam search, do not.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from trivet.inference.policy_ledger import TokenVersions
from trivet.inference.versioned_engine import collect_versions
from trivet.inference.vllm_names import (
    ChatCompletionResponse,
    GenerateTextChoice,
    GenerateTextResponse,
    GenerateTokensChoice,
    GenerateTokensResponse,
    OpenAIServingChat,
    ServingTokens,
)

Runs = list[tuple[int, int]]
ServeRequest = Callable[..., Awaitable[Any]]
ResponseT = TypeVar("ResponseT", bound=BaseModel)


class VersionedTokensChoice(GenerateTokensChoice):
    """A completion of token ids with the policy versions of its tokens."""

    policy_versions: Runs | None = None


class VersionedTextChoice(GenerateTextChoice):
    """A completion of token ids and text with the policy versions of its tokens."""

    policy_versions: Runs | None = None


class VersionedTokensResponse(GenerateTokensResponse):
    """A token-in, token-out answer whose choices have policy versions."""

    choices: list[VersionedTokensChoice]  # type: ignore[assignment]  adds a field to each choice


class VersionedTextResponse(GenerateTextResponse):
    """A token-in, token-out answer with text (`output_mode = "text"`) whose choices have policy versions."""

    choices: list[VersionedTextChoice]  # type: ignore[assignment]  adds a field to each choice


def add_versions_to_chat(serving: OpenAIServingChat) -> None:
    """Wrap `serving` so that its chat completions carry policy versions."""
    serve: ServeRequest = serving.create_chat_completion

    async def create_chat_completion(*args: Any, **kwargs: Any) -> Any:
        with collect_versions() as collected:
            answer = await serve(*args, **kwargs)
        if isinstance(answer, ChatCompletionResponse) and len(collected) == 1:
            for choice in answer.choices:
                choice.policy_versions = _runs(collected[0], choice.index, choice.token_ids)  # type: ignore[attr-defined]  extra fields are allowed
        return answer

    serving.create_chat_completion = create_chat_completion


def add_versions_to_tokens(serving: ServingTokens) -> None:
    """Wrap `serving` so that its token-in, token-out answers carry policy versions."""
    serve: ServeRequest = serving.serve_tokens

    async def serve_tokens(*args: Any, **kwargs: Any) -> Any:
        with collect_versions() as collected:
            answer = await serve(*args, **kwargs)
        if len(collected) != 1:
            return answer
        match answer:
            case GenerateTokensResponse():
                return _with_versions(answer, collected[0], VersionedTokensResponse, VersionedTokensChoice)
            case GenerateTextResponse():
                return _with_versions(answer, collected[0], VersionedTextResponse, VersionedTextChoice)
            case _:
                return answer

    serving.serve_tokens = serve_tokens


def _with_versions(answer: Any, versions: TokenVersions, response: type[ResponseT], choice: type[BaseModel]) -> ResponseT:
    """Return `answer` as a `response`, with the versions of each of its choices, which become a `choice`."""
    choices = [
        choice.model_construct(**dict(each), policy_versions=_runs(versions, each.index, each.token_ids))
        for each in answer.choices
    ]
    return response.model_construct(**{**dict(answer), "choices": choices})


def _runs(versions: TokenVersions, index: int, token_ids: list[int] | None) -> Runs:
    runs = [(int(run.version), run.length) for run in versions.runs.get(index, [])]
    counted = sum(length for _, length in runs)
    assert token_ids is None or counted == len(token_ids), f"{counted} versions for {len(token_ids)} tokens"
    return runs
