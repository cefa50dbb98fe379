"""Serves scripted policies to environments as an inference server would, on loopback.

The path of a base URL names the policy and the example, so one server answers for all of them: `/gold/17/v1/chat/completions`.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trivet.environments.apis.agents.formats import ChatFormat, ModelReply
from trivet.evaluation.scripted_policies import PolicyKind, Script, write_reply
from trivet.wire.groups import OVERLONG_REFUSALS

_FORMAT = ChatFormat()
_MAX_TURNS = 32
"""Replies of the policy in a conversation. A longer one is refused as too long for the context, which ends a rollout in order."""


class ScriptedServer:
    """Answers chat completions.

    >>> with serve_scripts() as server:
    ...     server.scripts = {17: Script(answer="4")}
    ...     base_url = server.base_url(PolicyKind.GOLD, 17)
    """

    def __init__(self, root: str) -> None:
        """Know no example yet. `root` is the server's address."""
        self.root = root
        self.scripts: Mapping[int, Script] = {}
        """The script of each example, by its id."""

    def base_url(self, policy: PolicyKind, example_id: int) -> str:
        """Return the base URL under which a policy answers for an example."""
        return f"{self.root}/{policy.value}/{example_id}/v1"

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the answer to a request."""
        try:
            policy, example_id = path.split("/")[1:3]
            script, request = self.scripts[int(example_id)], json.loads(body)
            messages, tools = request["messages"], request.get("tools") or []
            reply_of = PolicyKind(policy)
        except (ValueError, KeyError) as exc:
            return 404, {"error": {"message": f"no such policy, example or request: {exc}", "code": 404}}
        if sum(message.get("role") == "assistant" for message in messages) >= _MAX_TURNS:
            return 400, {"error": {"message": f"{OVERLONG_REFUSALS[0]}: {_MAX_TURNS} turns", "code": 400}}
        seed = request.get("seed") or 0
        message = write_reply(reply_of, script, messages=messages, tools=tools, seed=seed)
        reply = ModelReply(
            id=f"chatcmpl-{seed}",
            model=request.get("model", ""),
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else "stop",
            prompt_tokens=0,
            completion_tokens=len(str(message["content"]).split()),
            created=0,
        )
        return 200, _FORMAT.write(reply)


@contextmanager
def serve_scripts() -> Iterator[ScriptedServer]:
    """Serve on a free port of loopback for a block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = server.answer(self.path, body)
            is_streamed = status == HTTPStatus.OK and json.loads(body).get("stream")
            content = ("".join(_FORMAT.events(answer)) if is_streamed else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if is_streamed else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the answers are those of a test."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = ScriptedServer(f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever, name="scripted-server", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
