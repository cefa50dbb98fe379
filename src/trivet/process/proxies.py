"""Decides which servers are asked through a proxy, where the variables of a company network name one (HTTP_PROXY and its kin).

A server of the run is asked directly: a proxy mostly does not reach it, and would read the run's secret. Judges, hubs and other
services are asked as the variables say. Pure; used by the commands, the roles and the environment workers.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from urllib.parse import urlsplit, urlunsplit
from urllib.request import proxy_bypass_environment  # pyright: ignore[reportAttributeAccessIssue]  typeshed omits it

PROXY_ERRORS = (ImportError, ValueError)
"""The errors of httpx where the variables name a proxy that it cannot use: SOCKS without its package, or another scheme."""

OWN_DIRECT = "the servers of a run are asked without a proxy, judges and hubs through it"

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_EXCEPTIONS = "no_proxy"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_KNOWN_SCHEMES = ("http", "https", "socks5", "socks5h")
"""The schemes of proxies that httpx knows, through which hubs and judges are asked."""


def is_direct(url: str, environ: Mapping[str, str]) -> bool:
    """Return whether the server at `url` is asked without a proxy.

    True for an address in numbers, a name without a dot, which only a private network knows, and a host that `NO_PROXY` names.
    """
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        ip_address(host)
        return True
    exceptions = environ.get(_EXCEPTIONS) or environ.get(_EXCEPTIONS.upper()) or ""
    return "." not in host or bool(proxy_bypass_environment(host, {"no": exceptions}))


def direct_variables(environ: Mapping[str, str], urls: Iterable[str]) -> dict[str, str]:
    """Return the variables by which any client of this process, and of those it starts, asks the hosts of `urls` directly.

    This machine's own addresses are among them. Empty where no proxy is named.
    """
    if not find_proxies(environ):
        return {}
    named = (environ.get(_EXCEPTIONS) or environ.get(_EXCEPTIONS.upper()) or "").split(",")
    hosts = (*named, *_LOOPBACK, *(urlsplit(url).hostname or "" for url in urls))
    value = ",".join(dict.fromkeys(host.strip() for host in hosts if host.strip()))
    return {_EXCEPTIONS: value, _EXCEPTIONS.upper(): value}


def find_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies that `environ` names, by the names of the variables, without user and password."""
    found: dict[str, str] = {}
    for name in (spelling for proxy in _PROXIES for spelling in (proxy, proxy.upper())):
        if value := environ.get(name):
            try:
                parts = urlsplit(value)
                found[name] = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
            except ValueError:
                found[name] = "(no address)"
    return found


def find_unusable(environ: Mapping[str, str]) -> str | None:
    """Return which proxy cannot be used here and what to do, as a sentence; None when there is none."""
    for name, proxy in find_proxies(environ).items():
        scheme, has_scheme, _ = proxy.partition("://")
        if has_scheme and scheme not in _KNOWN_SCHEMES:
            schemes = ", ".join(f"{known}://" for known in _KNOWN_SCHEMES)
            return f"{name} = {proxy} is no proxy that can be used: write it with one of {schemes}"
        if scheme.startswith("socks") and find_spec("socksio") is None:
            return f"{name} = {proxy} needs a package that is not installed: uv pip install socksio PySocks, or unset {name}"
    return None
