"""Servers found by DNS name."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from trivet.config.sections.client import ElasticConfig

Resolve = Callable[[str], Awaitable[list[str]]]
"""From a host's name to its addresses. Raises OSError when the name is not known now."""


async def resolve(hostname: str) -> list[str]:
    """The addresses of `hostname`, sorted."""
    found = await asyncio.get_running_loop().getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    return sorted({str(address[4][0]) for address in found})


async def server_roots(config: ElasticConfig, ask: Resolve) -> list[str]:
    """Where the servers behind the name are now."""
    addresses = await ask(config.hostname)
    return [f"http://{f'[{address}]' if ':' in address else address}:{config.port}" for address in addresses]
