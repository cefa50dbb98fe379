"""Decides which requests go through a proxy, in a network whose environment variables name one (HTTP_PROXY and similar).

Requests to a server of the run go directly: most proxies cannot reach it, and a proxy would read the run's secret. Requests to
judges, hubs and other services follow the variables. Used by the commands, the roles and the environment workers.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit
from urllib.request import proxy_bypass_environment  # pyright: ignore[reportAttributeAccessIssue]  typeshed omits it

PROXY_ERRORS = (ImportError, ValueError)
"""Errors that httpx raises when the variables name a proxy that it cannot use: SOCKS without its package, or an unknown scheme."""

OWN_DIRECT = "the servers of a run are asked without a proxy, judges and hubs through it"

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_NO_PROXY = "no_proxy"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_KNOWN_SCHEMES = ("http", "https", "socks5", "socks5h")
"""The schemes of proxies that httpx can use."""


def is_direct(url: str, environ: Mapping[str, str]) -> bool:
    """Return whether requests to `url` go without a proxy.

    True for a numeric address, for a name without a dot, which only a private network has, and for a host that `NO_PROXY` names.
    """
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        ip_address(host)
        return True
    exceptions = environ.get(_NO_PROXY) or environ.get(_NO_PROXY.upper()) or ""
    return "." not in host or bool(proxy_bypass_environment(host, {"no": exceptions}))


def direct_variables(environ: Mapping[str, str], urls: Iterable[str]) -> dict[str, str]:
    """Return the variables with which this process and its children send requests to the hosts of `urls` without a proxy.

    The variables name the loopback addresses too. The result is empty when `environ` names no proxy.
    """
    if not find_proxies(environ):
        return {}
    named = (environ.get(_NO_PROXY) or environ.get(_NO_PROXY.upper()) or "").split(",")
    hosts = (*named, *_LOOPBACK, *(urlsplit(url).hostname or "" for url in urls))
    value = ",".join(dict.fromkeys(host.strip() for host in hosts if host.strip()))
    return {_NO_PROXY: value, _NO_PROXY.upper(): value}


def find_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies that `environ` names, by the name of the variable, without user name and password."""
    found: dict[str, str] = {}
    for name in (spelling for proxy in _PROXY_VARIABLES for spelling in (proxy, proxy.upper())):
        if value := environ.get(name):
            try:
                parts = urlsplit(value)
                found[name] = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
            except ValueError:
                found[name] = "(no address)"
    return found


def find_unusable(environ: Mapping[str, str]) -> str | None:
    """Describe a proxy that cannot be used here, and what to do about it; None when there is none."""
    for name, proxy in find_proxies(environ).items():
        scheme, has_scheme, _ = proxy.partition("://")
        if has_scheme and scheme not in _KNOWN_SCHEMES:
            schemes = ", ".join(f"{known}://" for known in _KNOWN_SCHEMES)
            return f"{name} = {proxy} is no proxy that can be used: write it with one of {schemes}"
        if scheme.startswith("socks") and find_spec("socksio") is None:
            return f"{name} = {proxy} needs a package that is not installed: uv pip install socksio PySocks, or unset {name}"
    return None
