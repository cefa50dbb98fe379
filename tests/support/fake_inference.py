"""A stand-in for the inference server behind httpx, without an engine: policies, updates and scripted chat completions.

server = FakeInference()
client = InferenceClient("http://fake", timeout_s=5, transport=server.transport)
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from trivet.errors import WeightsError
from trivet.weights.manifest import verify

START_DIGEST = "0" * 64

Script = Callable[[dict[str, Any]], Sequence[tuple[int, float]]]
"""Returns the sampled (token id, log-probability) pairs for a request's body."""


class FakeInference:
    """Answers as our server does. `update_weights` verifies the directory as the real one does."""

    def __init__(
        self, *, model: str = "fake-model", script: Script = lambda _: [(7, -0.5), (8, -1.5)], text: str = "ok"
    ) -> None:
        self.model = model
        self.version = 0
        self.digest = START_DIGEST
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        """Method, path and body, in order."""
        self.fail_with: httpx.Response | Exception | None = None
        """If set, the answer to every request."""
        self.num_unhealthy = 0
        """Number of health checks to refuse before the first that succeeds."""
        self._script = script
        self._text = text
        self.transport = httpx.MockTransport(self._handle)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        self.requests.append((request.method, request.url.path, body))
        if isinstance(self.fail_with, Exception):
            raise self.fail_with
        if self.fail_with is not None:
            return self.fail_with
        match request.method, request.url.path:
            case "GET", "/health":
                return self._health()
            case "GET", "/policy":
                return self._policy()
            case "GET", "/v1/models":
                return httpx.Response(200, json={"object": "list", "data": [{"id": self.model}]})
            case "POST", "/update_weights":
                return self._fetch(body) if "sources" in body else self._update(Path(body["weight_dir"]))
            case "POST", "/reload_weights":
                self.version, self.digest = 0, START_DIGEST
                return httpx.Response(200, json={"status": "ok", "version": 0, "digest": START_DIGEST})
            case "POST", "/sleep":
                return httpx.Response(200, json={"status": "ok"})
            case "POST", "/v1/chat/completions":
                return httpx.Response(200, json=self._chat(body))
            case "POST", "/inference/v1/generate":
                return httpx.Response(200, json={"request_id": "1", "choices": [self._choice(body)]})
            case _:
                return httpx.Response(404, json={"error": {"message": f"no route {request.url.path}"}})

    def _health(self) -> httpx.Response:
        if self.num_unhealthy:
            self.num_unhealthy -= 1
            return httpx.Response(503, json={"status": "error", "reason": "starting"})
        return httpx.Response(200)

    def _policy(self) -> httpx.Response:
        return httpx.Response(200, json={"model": self.model, "version": self.version, "digest": self.digest})

    def _update(self, directory: Path) -> httpx.Response:
        try:
            manifest = verify(directory)
        except WeightsError as exc:
            return httpx.Response(409, json={"status": "error", "reason": str(exc)})
        self.version, self.digest = manifest.version, manifest.digest
        return httpx.Response(200, json={"status": "ok", "version": self.version, "digest": self.digest})

    def _fetch(self, offer: dict[str, Any]) -> httpx.Response:
        self.version, self.digest = offer["version"], offer["digest"]
        return self._policy()

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        sampled = self._script(body)
        return {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": [token_id for token_id, _ in sampled],
            "logprobs": {
                "content": [
                    {"token": str(token_id), "logprob": logprob, "top_logprobs": [], "bytes": None}
                    for token_id, logprob in sampled
                ]
            },
            "policy_versions": [[self.version, len(sampled)]] if sampled else [],
        }

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        choice = {**self._choice(body), "message": {"role": "assistant", "content": self._text}}
        num_tokens = len(choice["token_ids"])
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": self.model,
            "choices": [choice],
            "prompt_token_ids": [1, 2, 3],
            "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": 3 + num_tokens},
        }
