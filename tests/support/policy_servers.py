"""Servers of policies on real sockets, and policies to fetch from them.

with PolicyServer(layout.weights) as origin:
    policy = offer_policy(layout.weights_step(1), sources=[origin.url])
"""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from trivet.config.layout import RunLayout
from trivet.gate import Gate
from trivet.weights.publish import publish
from trivet.weights.serve import MAX_TRANSFERS, PolicyFiles
from trivet.wire.versions import PolicyVersion

TOKEN = "5ec2e7"

Spoil = Callable[[str, int, bytes], bytes]
"""Returns what is sent in place of bytes, given the path and the number of bytes sent before. If it raises, the answer breaks."""


class PolicyServer:
    """Serves the policies in a directory in a thread, on a free port of 127.0.0.1 or on a given one."""

    def __init__(
        self,
        weights: Path,
        *,
        token: str = TOKEN,
        max_transfers: int = MAX_TRANSFERS,
        spoil: Spoil | None = None,
        port: int = 0,
    ) -> None:
        self.files = PolicyFiles(weights, max_transfers=max_transfers)
        self.requests: list[tuple[str, str]] = []
        """Path and Range of each request."""
        self._spoil = spoil
        gate = Gate(Starlette(routes=[self.files.route]), token=token, host="127.0.0.1", is_open=lambda _: False)
        self._app = gate
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            self._serve, interface="asgi3", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_sent = 0
        headers = dict(scope["headers"])
        self.requests.append((scope["path"], headers.get(b"range", b"").decode()))

        async def send_spoiled(message: Message) -> None:
            nonlocal num_sent
            body: Any = message.get("body")
            if body and self._spoil is not None:
                message = {**message, "body": self._spoil(scope["path"], num_sent, body)}
                num_sent += len(body)
            await send(message)

        await self._app(scope, receive, send_spoiled)

    def __enter__(self) -> "PolicyServer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def publish_files(layout: RunLayout, version: int, **files: bytes) -> Path:
    """Publish a policy with the given files, by name without suffix; return its directory."""

    def write(directory: Path) -> None:
        for name, content in files.items():
            (directory / f"{name}.safetensors").write_bytes(content)

    publish(layout, version=PolicyVersion(version), run_id="run", write=write)
    return layout.weights_step(version)
