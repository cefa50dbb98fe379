"""A server of chat completions with one token for each character. It runs with any release of verifiers: it needs nothing else.

server = CharacterServer(["Five", "Yes"])
with server.served_url() as url: ...
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from support.http_fake import serve


class CharacterServer:
    """Answers with the next of its texts. `<tool_call>name {…}` calls a tool. Every turn is sampled by a policy of its own."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.read: list[list[int]] = []
        self.sampled: list[list[int]] = []

    @contextmanager
    def served_url(self) -> Iterator[str]:
        """Its base URL while it listens on a port."""
        with serve(lambda method, path, body: (200, json.dumps(self.answer(json.loads(body))).encode())) as url:
            yield url

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Its answer to a chat-completions request."""
        text = "".join(f"{message['role']}:{_said(message)}\n" for message in body["messages"])
        known = body.get("known_token_ids") or []
        assert text.startswith(_decode(known)), "the known tokens are not those of the conversation"
        read = [*known, *_encode(text[len(known) :] + "assistant:")]
        sampled = _encode(self._answers[len(self.bodies)] + "\n")
        version = len(self.bodies)
        self.bodies.append(body)
        self.read.append(read)
        self.sampled.append(sampled)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": _message(self._answers[version]),
            "token_ids": sampled,
            "logprobs": {"content": [{"token": "", "logprob": -0.5, "top_logprobs": [], "bytes": None} for _ in sampled]},
            "policy_versions": [[version, len(sampled)]],
        }
        return {
            "id": f"chatcmpl-{version}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "prompt_token_ids": read,
            "usage": {"prompt_tokens": len(read), "completion_tokens": len(sampled), "total_tokens": len(read) + len(sampled)},
        }


def _said(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    said = "".join(f"<tool_call>{call['function']['name']} {call['function']['arguments']}" for call in calls)
    return (message.get("content") or "") + said


def _message(text: str) -> dict[str, Any]:
    if not text.startswith("<tool_call>"):
        return {"role": "assistant", "content": text}
    name, _, arguments = text.removeprefix("<tool_call>").partition(" ")
    call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def _decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(token_id) for token_id in token_ids)
