"""Guards the routes of a server of a run: only a client with the run's secret may use those that are not open to everyone."""

import hmac
import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from trivet.config.layout import SECRET_FILE
from trivet.process.sockets import is_loopback


class Gate:
    """ASGI middleware around all routes. It refuses requests that lack the secret, and requests of foreign web pages."""

    def __init__(self, app: ASGIApp, *, token: str, host: str, is_open: Callable[[str], bool]) -> None:
        """Guard `app`.

        Args:
            token: the run's secret.
            host: the interface that the server listens on.
            is_open: returns whether anyone may request a path.
        """
        self._app = app
        self._is_open = is_open
        self._expected = f"Bearer {token}".encode()
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        refusal = self._check(scope) if scope["type"] in ("http", "websocket") else None
        await (refusal or self._app)(scope, receive, send)

    def _check(self, scope: Scope) -> JSONResponse | None:
        """Return the answer that refuses a request; None for a request that is allowed."""
        headers = Headers(scope=scope)
        named = headers.get("host", "")
        if is_loopback(self._host) and not is_own_name(named, host=self._host):
            return refuse(403, f"the Host header says {named[:100]!r}; this server answers to {self._host} and localhost")
        if self._is_open(scope["path"].removeprefix(scope.get("root_path", ""))):
            return None
        if hmac.compare_digest(headers.get("authorization", "").encode(), self._expected):
            return None
        return refuse(
            401,
            "this route needs the run's secret as its bearer token: it is in .secret of the server's output_dir; name that "
            f"file with {SECRET_FILE}",
        )


def is_own_name(host_header: str, *, host: str) -> bool:
    """Return whether the Host header of a request names the server that listens on `host`.

    A web page can make its own name resolve to this machine (DNS rebinding), but not an address. Its Host header has that name.
    """
    try:
        name = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:  # `[` without its end
        return False
    if name in ("localhost", host.casefold()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return not is_loopback(host) and name == socket.gethostname().casefold()
    return address.is_loopback or not is_loopback(host)


def refuse(status_code: int, reason: str) -> JSONResponse:
    """Return the answer to a request that is not carried out."""
    return JSONResponse({"status": "error", "reason": reason}, status_code=status_code)
