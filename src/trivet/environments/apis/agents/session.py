"""Keeps what one agent asked the model in one rollout: the turns that are trained on, and its reward.

A retry of a client gets the answer of the request that it repeats, so nothing counts twice. An answer whose client had gone before
it was sent is not trained on: the agent never saw it. What lies in a connection's buffers counts as received. Limits end the
conversation with the model; what was answered before counts.
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
from trivet.errors import RolloutFailed


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one rollout of an agent."""

    max_turns: int = 64
    """Answers of the model."""
    max_tokens: int = 1_000_000
    """Tokens that the model samples."""
    timeout_s: float = 600.0
    """Seconds after which whoever runs the agent ends the session."""


Complete = Callable[[ModelRequest, int, Sequence[int]], Awaitable[dict[str, Any]]]
"""Asks the server for a chat completion with tokens. It gets the request, the number of the turn from 0, and the tokens that begin
the conversation as the model read and sampled them; it returns the answer's JSON."""


@dataclass(slots=True, kw_only=True)
class RecordedTurn:
    """An answer of the model."""

    messages: list[dict[str, Any]]
    """The conversation that was asked, in the OpenAI chat format."""
    reply: ModelReply
    turn: Turn
    is_delivered: bool = False
    """Whether a client received the answer."""


@dataclass(slots=True)
class ModelCall:
    """A request to the server, which several requests of a client may share."""

    digest: bytes
    """The digest of the request."""
    max_tokens: int
    """Tokens that the answer may have while it is under way; 0 if the agent named no limit."""
    answer: asyncio.Task[RecordedTurn]
    is_abandoned: bool = False
    """Whether the client went away before it had the answer."""

    def has_failed(self) -> bool:
        """Return whether there will be no answer."""
        return self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)


@dataclass(slots=True)
class AgentSession:
    """One rollout of an agent.

    >>> session = AgentSession(complete, limits)
    >>> call = await session.ask(request, is_retry=False)
    >>> call.answer.result().is_delivered = True
    """

    complete: Complete
    limits: SessionLimits
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    """The public part of its address."""
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
    has_ended: bool = False
    """Whether it was closed: then it asks nothing more, and takes no reward."""
    _calls: list[ModelCall] = field(default_factory=list[ModelCall])
    """Every request to the server, failed ones too."""

    async def ask(self, request: ModelRequest, *, is_retry: bool) -> ModelCall:
        """Return a call that has the model's answer. The caller notes whether the client received it.

        Args:
            is_retry: the client says that it repeats a request.

        Raises:
            RolloutFailed: a limit of the session is reached, the session ended, or the server failed.
        """
        self._require_open()
        digest = hashlib.sha256(msgspec.json.encode([request.messages, request.tools, request.max_tokens])).digest()
        call = next((call for call in reversed(self._calls) if call.digest == digest), None)
        if call is None or not (is_retry or call.is_abandoned) or call.has_failed():
            left, number = self._require_within_limits(), len(self._calls)
            limit = min(left, request.max_tokens or left)
            bounded = msgspec.structs.replace(request, max_tokens=limit)
            answer = asyncio.create_task(self._complete(bounded, number), name=f"turn-{number}")
            call = ModelCall(digest, limit if request.max_tokens else 0, answer)
            self._calls.append(call)
        call.is_abandoned = False
        try:
            await asyncio.shield(call.answer)
        except asyncio.CancelledError:
            if call.answer.cancelled():
                self._require_open()
            call.is_abandoned = True
            raise
        return call

    def report(self, reward: float, scores: dict[str, float]) -> None:
        """Note the reward that the agent reports. The newest counts. Raises RolloutFailed when the session has ended."""
        self._require_open()
        self.reward, self.scores = reward, scores
        self.rewarded.set()

    def delivered(self) -> list[RecordedTurn]:
        """Return the turns whose answers were received, in their order."""
        return [recorded for recorded in self.turns if recorded.is_delivered]

    async def aclose(self) -> None:
        """End the session, and cancel requests that are under way."""
        self.has_ended = True
        for call in self._calls:
            call.answer.cancel()
        await asyncio.gather(*(call.answer for call in self._calls), return_exceptions=True)

    def _require_open(self) -> None:
        if self.has_ended:
            raise RolloutFailed("the session has ended", kind="SessionEnded")

    def _require_within_limits(self) -> int:
        """Return the tokens that are left for an answer. Answers under way count with the limits that the agent named."""
        reserved = [call.max_tokens for call in self._calls if not call.answer.done()]
        num_tokens = sum(len(recorded.turn.completion_ids) for recorded in self.turns) + sum(reserved)
        for count, limit, key in (
            (len(self.turns) + len(reserved), self.limits.max_turns, "max_turns"),
            (num_tokens, self.limits.max_tokens, "max_tokens"),
        ):
            if count >= limit:
                self.is_cut = True
                message = f"this rollout may have no more answers: {key} ({limit}) is reached"
                raise RolloutFailed(message, kind="LimitReached")
        return self.limits.max_tokens - num_tokens

    async def _complete(self, request: ModelRequest, number: int) -> RecordedTurn:
        try:
            answer = await self.complete(request, number, self._known_tokens(request.messages))
        except RolloutFailed as exc:
            self.failure = exc
            raise
        choice, turn = answer["choices"][0], read_turn(answer)
        reply = ModelReply(
            id=secrets.token_hex(12),
            model=answer.get("model", ""),
            message={name: value for name, value in choice["message"].items() if value is not None or name == "content"},
            finish_reason=choice.get("finish_reason") or "stop",
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(turn.completion_ids),
            created=int(time.time()),
            call_fields=request.call_fields,
        )
        self.turns.append(RecordedTurn(messages=request.messages, reply=reply, turn=turn))
        return self.turns[-1]

    def _known_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of the newest turn that a conversation continues; none if it begins anew."""
        normal = [_normalize(message) for message in messages]
        for recorded in reversed(self.turns):
            before = [*map(_normalize, recorded.messages), _normalize(recorded.reply.message)]
            if normal[: len(before)] == before:
                return [*recorded.turn.prompt_ids, *recorded.turn.completion_ids]
        return []


def _normalize(message: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what identifies a message: clients send it back in other words, without fields that they do not know."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part)) for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message.get("role"), content, [(call["name"], _canonical(call["arguments"])) for call in calls]


def _canonical(arguments: object) -> object:
    """Return the arguments of a call, decoded: clients write JSON in other words."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
