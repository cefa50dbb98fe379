"""Serves the page of `trivet view` and its API over HTTP. It answers GET and HEAD alone and writes nothing.

It knows no paths: what a client sends is looked up among names that are there, never joined to a directory.

Python's own HTTP server carries it, not starlette on uvicorn. uvicorn answers connections beyond its limit with 503 and leaves
idle ones open, where this server closes each at once; and it limits addresses and refuses other methods in its own way.

A page of another site must not read a run through the user's browser: requests are answered only when they name this server as
their host (a foreign name that resolves to the loopback address is refused), and no answer allows another origin.
"""

import gzip
import ipaddress
import logging
import socket
import sys
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from trivet.errors import ConfigError
from trivet.view.api import Api, BadQuery
from trivet.view.files import NotServed

logger = logging.getLogger(__name__)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_JSON = "application/json"
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
"""Answers longer than this are compressed: shorter ones fit into a few packets anyway."""
_IDLE_S = 60.0
"""An idle connection is closed then; the page asks every two seconds."""
_MAX_TARGET_CHARS = 8192
"""Characters of an address: enough for the names of all metrics that one request may ask for."""
_MAX_FIELDS = 20
"""Fields of a query; no request of the page has as many."""
_MAX_CONNECTIONS = 64
"""Each takes a thread; a browser opens six to one server."""


class ViewServer(ThreadingHTTPServer):
    """Serves until `shutdown` is called."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], *, family: socket.AddressFamily, api: Api) -> None:
        self.address_family = family
        self.api = api
        self.pages = read_pages()
        self.given_host = address[0]
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address under which a browser of this machine finds it."""
        host = self.given_host
        if host in ("", "0.0.0.0", "::"):
            host = "localhost"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close a connection beyond the limit at once."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then free the connection's place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that goes away in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def is_meant(self, host_header: str) -> bool:
        """Return whether a request's Host names this server."""
        try:
            name = urlsplit(f"//{host_header}").hostname or ""
        except ValueError:  # `[` without its end
            return False
        if name in ("localhost", self.given_host.casefold()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return not _is_loopback(self.given_host) and name == socket.gethostname().casefold()
        # An address cannot be rebound, a name can.
        return address.is_loopback or not _is_loopback(self.given_host)


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer  # pyright: ignore[reportIncompatibleVariableOverride]  # typeshed has the base class of all servers
    protocol_version = "HTTP/1.1"
    server_version = "trivet"
    sys_version = ""
    timeout = _IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """A terminal with a line for each request every two seconds helps nobody."""

    def _answer(self, *, with_body: bool) -> None:
        if not self.server.is_meant(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, _error("this server was asked for under a name that is not its own"), _JSON)
            return
        if len(self.path) > _MAX_TARGET_CHARS:
            self._send(HTTPStatus.REQUEST_URI_TOO_LONG, _error("the address is too long"), _JSON)
            return
        try:
            target = urlsplit(self.path)
            query = dict(parse_qsl(target.query, max_num_fields=_MAX_FIELDS))
        except ValueError as exc:
            self._send(HTTPStatus.BAD_REQUEST, _error(f"the address cannot be read: {exc}"), _JSON, with_body=with_body)
            return
        if target.path.startswith("/api/"):
            self._answer_api(target.path, query, with_body=with_body)
            return
        page = self.server.pages.get(target.path)
        if page is None:
            self._send(HTTPStatus.NOT_FOUND, _error("there is no such page"), _JSON, with_body=with_body)
            return
        self._send(
            HTTPStatus.OK,
            page,
            _TYPES["." + target.path.rpartition(".")[2] if "." in target.path else ".html"],
            with_body=with_body,
        )

    def _answer_api(self, path: str, query: Mapping[str, str], *, with_body: bool) -> None:
        try:
            answer = self.server.api.answer(path, query, known=self.headers.get("If-None-Match", "").strip('"'))
        except BadQuery as exc:
            self._send(HTTPStatus.BAD_REQUEST, _error(str(exc)), _JSON, with_body=with_body)
        except NotServed as exc:
            self._send(HTTPStatus.NOT_FOUND, _error(str(exc)), _JSON, with_body=with_body)
        except Exception:  # a fault of ours, or a file nobody foresaw: the page says so, and the other pages work
            logger.exception("cannot answer %s", path)
            fault = _error(f"{path} cannot be answered: a fault of trivet view; its terminal has the details")
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, fault, _JSON, with_body=with_body)
        else:
            status = HTTPStatus.NOT_MODIFIED if answer.is_known else HTTPStatus.OK
            self._send(status, answer.body, _JSON, tag=answer.tag, with_body=with_body)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, *, tag: str = "", with_body: bool = True) -> None:
        is_zipped = len(body) > _ZIP_FROM_BYTES and "gzip" in self.headers.get("Accept-Encoding", "")
        if is_zipped:
            body = gzip.compress(body, compresslevel=1)
        self.send_response(status)
        for name, value in _GUARDS.items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", f'"{tag}"')
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        if is_zipped:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if with_body and status is not HTTPStatus.NOT_MODIFIED:
            self.wfile.write(body)


def open_server(api: Api, *, host: str, port: int) -> ViewServer:
    """Return a server that listens already.

    Args:
        port: 0 for a free one.

    Raises:
        ConfigError: it cannot listen there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = ViewServer((str(address[0]), port), family=family, api=api)
    except (OSError, OverflowError, UnicodeError) as exc:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {exc}; --port 0 finds a free one") from exc
    server.given_host = host
    return server


def read_pages() -> dict[str, bytes]:
    """Return the page's files by the path of their address."""
    found = {f"/{item.name}": item.read_bytes() for item in files("trivet.view").joinpath("static").iterdir()}
    return {"/": found["/index.html"], **{name: data for name, data in found.items() if name.endswith(tuple(_TYPES))}}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _error(text: str) -> bytes:
    return msgspec.json.encode({"error": text})
