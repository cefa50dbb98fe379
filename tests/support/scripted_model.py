"""A model client that answers from a script, in the exact form of our server's chat completions."""

from collections.abc import Callable
from typing import Any

from openai.types.chat import ChatCompletion

from trivet.environments.apis.v0.play import ModelClient

Answer = Callable[[list[dict[str, Any]]], str]


def call_of(name: str, arguments: str) -> str:
    """Make an answer that calls a tool, as the server's parser returns it."""
    return f"<tool_call>{name} {arguments}"


class ScriptedModel(ModelClient):
    """Answers one token per character, log-probability -0.5 each, sampled by `version`. Raises `errors` first, one a
    request."""

    def __init__(self, answer: Answer, *, version: int = 0, errors: list[Exception] | None = None) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # nothing is sent
        self._answer = answer
        self._version = version
        self._errors = errors or []
        self.requests: list[dict[str, Any]] = []

    async def close(self) -> None:
        pass

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs) -> ChatCompletion:
        self.requests.append({"prompt": prompt, "model": model, "sampling_args": sampling_args})
        if self._errors:
            raise self._errors.pop(0)
        text = self._answer(prompt)
        tokens = [ord(character) for character in text]
        body = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "prompt_token_ids": [ord(character) for character in "".join(str(message["content"]) for message in prompt)],
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": _message(text),
                    "token_ids": tokens,
                    "logprobs": {
                        "content": [{"token": "", "logprob": -0.5, "top_logprobs": [], "bytes": None} for _ in tokens]
                    },
                    "policy_versions": [[self._version, len(tokens)]] if tokens else [],
                }
            ],
        }
        return ChatCompletion.model_validate(body)


def _message(text: str) -> dict[str, Any]:
    if not text.startswith("<tool_call>"):
        return {"role": "assistant", "content": text}
    name, _, arguments = text.removeprefix("<tool_call>").partition(" ")
    call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
