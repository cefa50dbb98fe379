"""Keeps what one agent asked the model in one rollout: the turns that are trained on, and its reward.

A retry of a client gets the answer of the request that it repeats, so nothing counts twice. An answer that no client received is
not trained on: the agent never saw it. Limits end the conversation with the model; what was answered before counts.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trivet.environments.apis.agents.formats import ModelReply, ModelRequest
from trivet.environments.apis.turns import Turn, read_turn
from trivet.errors import RolloutFailed, TrivetError


class LimitReached(TrivetError):
    """The session may ask the model nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The limits of one rollout of an agent."""

    max_turns: int = 64
    """Answers of the model."""
    max_tokens: int = 1_000_000
    """Tokens that the model samples."""


Complete = Callable[[ModelRequest, int, Sequence[int]], Awaitable[dict[str, Any]]]
"""Asks the server for a chat completion with tokens. It gets the request, the number of the turn from 0, and the tokens that begin
the conversation as the model read and sampled them; it returns the answer's JSON."""


@dataclass(slots=True, kw_only=True)
class RecordedTurn:
    """An answer of the model."""

    messages: list[dict[str, Any]]
    """The conversation that was asked, in the OpenAI chat format."""
    message: dict[str, Any]
    """The answer."""
    turn: Turn
    is_delivered: bool = False
    """Whether a client received the answer."""


@dataclass(slots=True)
class _Asked:
    answer: "asyncio.Task[tuple[ModelReply, RecordedTurn]]"
    is_abandoned: bool = False
    """Whether the client went away before it had the answer."""


@dataclass(slots=True)
class AgentSession:
    """One rollout of an agent.

    >>> session = AgentSession(complete, limits)
    >>> reply, recorded = await session.ask(request, is_retry=False)
    >>> recorded.is_delivered = True
    """

    complete: Complete
    limits: SessionLimits
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """The key by which its requests are recognized."""
    turns: list[RecordedTurn] = field(default_factory=list[RecordedTurn])
    reward: float | None = None
    """What the agent reported; None until it does."""
    scores: dict[str, float] = field(default_factory=dict[str, float])
    rewarded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the agent has reported its reward."""
    is_cut: bool = False
    """Whether a limit refused a request."""
    failure: RolloutFailed | None = None
    """The newest failure of a request to the server."""
    _asked: dict[str, _Asked] = field(default_factory=dict[str, _Asked])
    _num_asked: int = 0
    """Requests to the server, failed ones too: each has a seed of its own."""
    _reserved: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens that the answers under way may have, by the number of the request; 0 where the agent named no limit."""

    async def ask(self, request: ModelRequest, *, is_retry: bool) -> tuple[ModelReply, RecordedTurn]:
        """Return the model's answer. The caller notes whether the client received it.

        Args:
            is_retry: the client says that it repeats a request.

        Raises:
            LimitReached: a limit of the session is reached.
        """
        digest = hashlib.sha256(msgspec.json.encode([request.messages, request.tools, request.max_tokens])).hexdigest()
        asked = self._asked.get(digest)
        if asked is None or not (is_retry or asked.is_abandoned) or _has_failed(asked):
            left = self._require_within_limits()
            number, self._num_asked = self._num_asked, self._num_asked + 1
            limit = min(left, request.max_tokens or left)
            self._reserved[number] = limit if request.max_tokens else 0
            bounded = msgspec.structs.replace(request, max_tokens=limit)
            asked = self._asked[digest] = _Asked(asyncio.create_task(self._complete(bounded, number), name=f"turn-{number}"))
        asked.is_abandoned = False
        try:
            return await asyncio.shield(asked.answer)
        except asyncio.CancelledError:
            asked.is_abandoned = True
            raise

    def note_abandoned(self, request: ModelRequest) -> None:
        """Note that the client went away while it was sent an answer, so that a repeated request gets that answer."""
        digest = hashlib.sha256(msgspec.json.encode([request.messages, request.tools, request.max_tokens])).hexdigest()
        self._asked[digest].is_abandoned = True

    def report(self, reward: float, scores: dict[str, float]) -> None:
        """Note the reward that the agent reports. The newest counts."""
        self.reward, self.scores = reward, scores
        self.rewarded.set()

    def delivered(self) -> list[RecordedTurn]:
        """Return the turns whose answers were received, in their order."""
        return [recorded for recorded in self.turns if recorded.is_delivered]

    async def aclose(self) -> None:
        """Cancel requests that are under way."""
        running = [asked.answer for asked in self._asked.values() if not asked.answer.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _require_within_limits(self) -> int:
        """Return the tokens that are left for an answer. Answers under way count with the limits that the agent named."""
        num_tokens = sum(len(recorded.turn.completion_ids) for recorded in self.turns) + sum(self._reserved.values())
        for count, limit, key in (
            (len(self.turns) + len(self._reserved), self.limits.max_turns, "max_turns"),
            (num_tokens, self.limits.max_tokens, "max_tokens"),
        ):
            if count >= limit:
                self.is_cut = True
                raise LimitReached(f"this rollout may have no more answers: {key} ({limit}) is reached")
        return self.limits.max_tokens - num_tokens

    async def _complete(self, request: ModelRequest, number: int) -> tuple[ModelReply, RecordedTurn]:
        try:
            answer = await self.complete(request, number, self._known_tokens(request.messages))
        except RolloutFailed as exc:
            self.failure = exc
            raise
        finally:
            del self._reserved[number]
        choice = answer["choices"][0]
        message = {name: value for name, value in choice["message"].items() if value is not None or name == "content"}
        recorded = RecordedTurn(messages=request.messages, message=message, turn=read_turn(answer))
        self.turns.append(recorded)
        reply = ModelReply(
            id=secrets.token_hex(12),
            model=answer.get("model", ""),
            message=message,
            finish_reason=choice.get("finish_reason") or "stop",
            prompt_tokens=len(recorded.turn.prompt_ids),
            completion_tokens=len(recorded.turn.completion_ids),
            created=int(time.time()),
        )
        return reply, recorded

    def _known_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of the newest turn that a conversation continues; none if it begins anew."""
        normal = [_normalize(message) for message in messages]
        for recorded in reversed(self.turns):
            before = [*map(_normalize, recorded.messages), _normalize(recorded.message)]
            if normal[: len(before)] == before:
                return [*recorded.turn.prompt_ids, *recorded.turn.completion_ids]
        return []


def _has_failed(asked: _Asked) -> bool:
    return asked.answer.done() and (asked.answer.cancelled() or asked.answer.exception() is not None)


def _normalize(message: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what identifies a message: clients send it back in other words, without fields that they do not know."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part)) for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return (
        message.get("role"),
        content,
        tuple((call["name"], _canonical(call["arguments"])) for call in calls),
    )


def _canonical(arguments: object) -> str:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return str(arguments)
    return json.dumps(value, sort_keys=True)
