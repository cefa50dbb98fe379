"""Decides who may use which route: anyone may ask for completions, only who has the run's secret may change the server.

Routes that are not listed here require the secret, because a new version of vLLM may add some. With `server.api_key` vLLM itself
requires the key where completions are made, and accepts the secret as well.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from trivet.config.layout import SECRET_FILE

_OPEN = frozenset(
    {"/health", "/ping", "/policy", "/version", "/load", "/metrics", "/tokenize", "/detokenize"}
    | {"/pooling", "/classify", "/score", "/rerank", "/v2/rerank", "/inference/v1/generate"}
)
_OPEN_BELOW_V1 = frozenset(
    {"models", "completions", "chat", "responses", "messages", "embeddings", "score", "rerank", "audio", "realtime"}
)
"""The open routes below `/v1/`."""


class Gate:
    """ASGI middleware around all routes: refuses requests without the secret, and those of foreign web pages."""

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        """Guard `app`.

        Args:
            token: the run's secret.
            host: the interface that the server listens on.
        """
        self._app = app
        self._expected = f"Bearer {token}".encode()
        # A web page can resolve its own name to this address (DNS rebinding); the browser then treats this server as the page's.
        self._hosts = {"localhost", "127.0.0.1", "::1", host.lower()} if _is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        refused = self._refuse(scope) if scope["type"] in ("http", "websocket") else None
        await (refused or self._app)(scope, receive, send)

    def _refuse(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        name = _host_name(headers.get("host", ""))
        if self._hosts is not None and name not in self._hosts:
            return _refusal(
                403, f"the Host header says {name[:100]!r}; this server answers to {', '.join(sorted(self._hosts))}"
            )
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if _is_open(path) or hmac.compare_digest(headers.get("authorization", "").encode(), self._expected):
            return None
        return _refusal(
            401,
            "this route wants the run's secret as its bearer token: it is in .secret of the server's output_dir; name that "
            f"file with {SECRET_FILE}",
        )


def guard(app: FastAPI, *, token: str, host: str) -> None:
    """Put the gate around `app`. vLLM may have built its middleware stack already: then none can be added the usual way."""
    app.middleware_stack = Gate(app.middleware_stack or app.build_middleware_stack(), token=token, host=host)


def _is_open(path: str) -> bool:
    return path in _OPEN or (path.startswith("/v1/") and path.split("/")[2] in _OPEN_BELOW_V1)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_name(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _refusal(status_code: int, reason: str) -> JSONResponse:
    return JSONResponse({"status": "error", "reason": reason}, status_code=status_code)
