"""Serves stand-ins for the inference server on a real port, for requests from other processes or over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.fake_inference import FakeInference

Answer = Callable[[str, str, bytes], tuple[int, bytes]]
"""Returns status and JSON for a method, a path and a body."""


@contextmanager
def serve_fake(fake: FakeInference) -> Iterator[str]:
    """Yields the base URL of a server that answers as `fake` does."""
    import httpx  # an old release of verifiers may come without it, and needs `serve` alone

    with httpx.Client(transport=fake.transport, base_url="http://fake") as client:

        def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
            response = client.request(method, path, content=body)
            return response.status_code, response.content

        with serve(answer) as url:
            yield url


@contextmanager
def serve(answer: Answer) -> Iterator[str]:
    """Yield the base URL of a server that calls `answer` for each request, several at one time."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._reply(self.rfile.read(int(self.headers["Content-Length"])))

        do_PUT = do_POST

        def do_GET(self) -> None:
            self._reply(b"")

        def _reply(self, body: bytes) -> None:
            status, content = answer(self.command, self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()
