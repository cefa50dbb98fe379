"""Serves the page of `trivet view` and its API over HTTP, with a starlette application on uvicorn. It only reads.

No text from a client becomes part of a path: it is only compared with names of existing files.

A page of another site must not read a run through the user's browser. So requests are answered only when they name this server as
their host. A foreign name that resolves to the loopback address is refused. And no answer allows another origin.
"""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trivet.errors import ConfigError
from trivet.gate import is_own_name
from trivet.view.api import Api, BadQuery

logger = logging.getLogger(__name__)

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_GUARDS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_ZIP_FROM_BYTES = 4096
"""Answers longer than this are compressed. Shorter ones fit into a few packets."""
_IDLE_S = 60
"""Seconds after which an idle connection is closed. The page sends a request every two seconds."""
_MAX_QUERY_CHARS = 8192
"""Limit of characters of a query: enough for the names of all metrics that one request may have."""
_STOP_TIMEOUT_S = 2
"""Seconds that requests have to end when the server stops. Each reads a few files."""


class ViewServer:
    """Serves the page of some runs on a socket."""

    def __init__(self, api: Api, *, host: str, port: int) -> None:
        """Listen.

        Args:
            port: 0 for a free one.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._socket = socket.create_server((str(address[0]), port), family=family, backlog=64)
        except (OSError, OverflowError, UnicodeError) as exc:
            raise ConfigError(f"cannot listen on --host {host} --port {port}: {exc}; --port 0 finds a free one") from exc
        self.port: int = self._socket.getsockname()[1]
        shown = "localhost" if host in ("", "0.0.0.0", "::") else host
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"
        """The address of the page for a browser on this machine."""
        self._application = make_application(api, host=host)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve in a thread during the block. Signals go to the code of the block."""
        config = uvicorn.Config(
            self._application,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # the page sends a request every two seconds, and a line for each would fill the terminal
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [self._socket]}, name="server")
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()


def make_application(api: Api, *, host: str) -> "GuardedApplication":
    """Return the application that answers for `api`.

    Args:
        host: the address that the user gave to listen on.
    """
    pages = read_pages()

    def answer_page(request: Request) -> Response:
        path = request.url.path
        if (page := pages.get(path)) is None:
            return _error(404, "there is no such page")
        return Response(page, media_type=_TYPES[path.rpartition(".")[2] if "." in path else "html"])

    def answer_api(request: Request) -> Response:
        path, known = request.url.path, request.headers.get("If-None-Match", "").strip('"')
        try:
            answer = api.answer(path, dict(request.query_params), client_tag=known)
        except ConfigError as exc:
            return _error(400 if isinstance(exc, BadQuery) else 404, str(exc))
        except Exception:  # a fault of trivet, or an unforeseen file: the page shows it, and the other pages still work
            logger.exception("cannot answer %s", path)
            return _error(500, f"{path} cannot be answered: a fault of trivet view; its terminal has the details")
        headers = {"ETag": f'"{answer.tag}"'}
        if answer.body is None:
            return Response(status_code=304, headers=headers)
        return Response(answer.body, media_type="application/json", headers=headers)

    routes = [Route("/api/{name:path}", answer_api), Route("/{name:path}", answer_page)]
    zipped = GZipMiddleware(Starlette(routes=routes), minimum_size=_ZIP_FROM_BYTES, compresslevel=1)
    return GuardedApplication(zipped, given_host=host)


class GuardedApplication:
    """Refuses requests that are not meant for this server, and adds the headers in `_GUARDS` to every answer."""

    def __init__(self, application: ASGIApp, *, given_host: str) -> None:
        self._application = application
        self._given_host = given_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in _GUARDS.items()]
            await send(message)

        application = self._application
        if not is_own_name(Headers(scope=scope).get("Host", ""), host=self._given_host):
            application = _error(403, "this server was asked for under a name that is not its own")
        elif len(scope["query_string"]) > _MAX_QUERY_CHARS:
            application = _error(414, "the address is too long")
        await application(scope, receive, send_guarded)


def read_pages() -> dict[str, bytes]:
    """Return the files of the page, by the path in their URL."""
    found = {f"/{item.name}": item.read_bytes() for item in files("trivet.view").joinpath("static").iterdir()}
    return {"/": found["/index.html"], **{name: data for name, data in found.items() if name.rpartition(".")[2] in _TYPES}}


def _error(status: int, text: str) -> Response:
    return Response(msgspec.json.encode({"error": text}), status_code=status, media_type="application/json")
