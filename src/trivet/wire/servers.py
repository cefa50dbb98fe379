"""Defines how a process reaches the inference servers: addresses, the variables that hold their keys, headers, time limits.

It carries the names of variables, never the keys.
"""

from collections.abc import Mapping

import msgspec

OVERLONG_REFUSALS = ("maximum context length", "max_tokens must be at least 1")
"""What vLLM says of a prompt that is longer than the context, and of one that fills it."""


class ServerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The inference servers, as an environment worker asks them."""

    base_urls: list[str]
    key_variables: list[str]
    """Environment variable that holds the key: one for all servers, or one per entry of `base_urls`."""
    headers: dict[str, str] = {}
    """Sent with every request."""
    timeout_s: float = 1200.0
    """Longest time for one request, seconds."""

    def api_key(self, base_url: str, environ: Mapping[str, str]) -> str | None:
        """Return the key for the server at `base_url`, None when its variable is not set."""
        return environ.get(self.key_variable(base_url))

    def key_variable(self, base_url: str) -> str:
        """Return the name of the variable that holds the key for the server at `base_url`."""
        roots = [server_root(url) for url in self.base_urls]
        root = server_root(base_url)
        index = roots.index(root) if root in roots and len(self.key_variables) > 1 else 0
        return self.key_variables[index]


def server_root(base_url: str) -> str:
    """Return a server's address without `/v1`, which names it in events and logs."""
    return base_url.rstrip("/").removesuffix("/v1")
