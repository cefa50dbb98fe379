"""Adds `policy_versions` to vLLM's answers: one [version, length] per run of sampled tokens, in order.

Complete answers of chat completions and of token-in, token-out have it; streamed ones, and those of beam search, do not.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from trivet.inference.policy_ledger import TokenVersions
from trivet.inference.versioned_engine import collect_versions
from trivet.inference.vllm_names import (
    ChatCompletionResponse,
    GenerateResponse,
    GenerateResponseChoice,
    OpenAIServingChat,
    ServingTokens,
)

Runs = list[tuple[int, int]]
ServeRequest = Callable[..., Awaitable[Any]]


class VersionedChoice(GenerateResponseChoice):
    """A completion with the policy versions of its tokens."""

    policy_versions: Runs | None = None


class VersionedGenerateResponse(GenerateResponse):
    """A token-in, token-out answer whose choices have policy versions."""

    choices: list[VersionedChoice]  # type: ignore[assignment]  adds a field to each choice


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
        if not isinstance(answer, GenerateResponse) or len(collected) != 1:
            return answer
        choices = [
            VersionedChoice.model_construct(**dict(choice), policy_versions=_runs(collected[0], choice.index, choice.token_ids))
            for choice in answer.choices
        ]
        return VersionedGenerateResponse.model_construct(**{**dict(answer), "choices": choices})

    serving.serve_tokens = serve_tokens


def _runs(versions: TokenVersions, index: int, token_ids: list[int] | None) -> Runs:
    runs = [(int(run.version), run.length) for run in versions.runs.get(index, [])]
    counted = sum(length for _, length in runs)
    assert token_ids is None or counted == len(token_ids), f"{counted} versions for {len(token_ids)} tokens"
    return runs
