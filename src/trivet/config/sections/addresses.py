"""Types of keys that hold a web address or a name of a machine. They are checked when the configuration is read."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

_EXAMPLE = "http://127.0.0.1:8000/v1"


def _require_web_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises for one that is no port
    except ValueError as exc:
        raise ValueError(f"is no web address ({exc}); write it like {_EXAMPLE}") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or any(char.isspace() for char in url):
        raise ValueError(f"must start with http:// or https:// and name a host, like {_EXAMPLE}")
    _require_host(parts.hostname)
    return url


def _require_no_password(url: str) -> str:
    if urlsplit(url).username is not None:
        raise ValueError(
            "must not hold a user and password, because logs and events name servers by their addresses: send them as "
            'headers = { Authorization = "Basic ..." }, or name a variable with the key in api_key_var'
        )
    return url


def _require_host(host: str) -> str:
    try:
        is_sound = bool(host) and host.isprintable() and "\0" not in host and bool(host.encode("idna"))
    except UnicodeError:
        is_sound = False
    if not is_sound:
        raise ValueError("is no name or address of a machine")
    return host


WebAddress = Annotated[str, AfterValidator(_require_web_address)]
"""An address of the web: http or https, with a host."""
ServerAddress = Annotated[WebAddress, AfterValidator(_require_no_password)]
"""The address of a server, which logs may name: it holds no password."""
Host = Annotated[str, Field(min_length=1), AfterValidator(_require_host)]
"""The name or the address of a machine or of one of its interfaces."""
