"""Asks an inference server for the completions of an environment of verifiers 0.1.2 to 0.1.10, which calls an OpenAI client.

These releases keep each answer of the client as it is, so it still carries token ids and policy versions when the rollout is over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from trivet.environments.apis.requests import turn_seed

_CHAT = "/chat/completions"


class RolloutOpenAI(AsyncOpenAI):
    """The OpenAI client of one rollout. Each turn gets a seed of its own, and the tokens of the turn that it continues."""

    def __init__(self, *, http_client: DefaultAsyncHttpxClient, keeps_tokens: bool, **options: Any) -> None:
        """Ask through `http_client`, which the rollouts of a server share.

        Args:
            keeps_tokens: a turn begins with the tokens of the turn that it continues, where the chat template allows it.
        """
        super().__init__(http_client=http_client, **options)
        self._keeps_tokens = keeps_tokens
        self._turns: list[tuple[list[Any], list[int]]] = []
        """Messages up to the end of each turn, and their tokens as read and sampled."""

    async def post(self, path: str, *, cast_to: Any, body: Any = None, **options: Any) -> Any:
        """Send a request; chat completions with the seed and the known tokens of their turn."""
        send: Any = super().post
        if path != _CHAT or not isinstance(body, dict):
            return await send(path, cast_to=cast_to, body=body, **options)
        messages = [_comparable(message) for message in body["messages"]]
        extra: dict[str, Any] = {}
        if body.get("seed") is not None:
            extra["seed"] = turn_seed(body["seed"], len(self._turns))
        if self._keeps_tokens and (known := self._known_tokens(messages)):
            extra["known_token_ids"] = known
        answer = await send(path, cast_to=cast_to, body={**body, **extra}, **options)
        if self._keeps_tokens:
            choice = answer.choices[0]
            said = _comparable({**choice.message.model_dump(), "role": "assistant"})
            token_ids = [*answer.prompt_token_ids, *choice.token_ids]
            self._turns.append(([*messages, said], token_ids))
        return answer

    def _known_tokens(self, messages: Sequence[Any]) -> list[int] | None:
        """Return the tokens of the last turn that `messages` continue; None when they continue none."""
        for said, token_ids in reversed(self._turns):
            if messages[: len(said)] == said:
                return token_ids
        return None


def _comparable(message: Any) -> tuple[Any, ...]:
    """Return what a message keeps when verifiers sends it again: its role, its text and its calls."""
    fields: Mapping[str, Any] = message if isinstance(message, dict) else message.model_dump()
    calls = [call if isinstance(call, dict) else call.model_dump() for call in fields.get("tool_calls") or []]
    said = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return fields["role"], fields.get("content") or "", said, fields.get("tool_call_id")


class OpenAIServer:
    """The clients of one server, one for each rollout, on shared connections."""

    def __init__(self, *, keeps_tokens: bool, trust_env: bool, **options: Any) -> None:
        """Make the connections.

        Args:
            keeps_tokens: see `RolloutOpenAI`. Only a trivet server accepts the token ids.
            trust_env: ask through the proxies that the variables name.
            options: of every client, as `AsyncOpenAI` takes them.
        """
        self._http = DefaultAsyncHttpxClient(timeout=options["timeout"], trust_env=trust_env)
        self._keeps_tokens = keeps_tokens
        self._options = options

    def for_rollout(self) -> RolloutOpenAI:
        """Return the client of one rollout."""
        return RolloutOpenAI(http_client=self._http, keeps_tokens=self._keeps_tokens, **self._options)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
