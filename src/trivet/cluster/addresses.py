"""Finds out at which address other nodes reach this one, and through which network interface."""

import socket

import psutil

from trivet.errors import ConfigError
from trivet.process.sockets import address_towards, is_loopback

_ELSEWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737). A route to it is the default route; nothing is sent."""


def own_address(named: str | None) -> str:
    """Return the address at which the other nodes reach the first one.

    Args:
        named: the name by which the scheduler knows this node.

    Raises:
        ConfigError: it cannot be told.
    """
    for candidate in (named, _ELSEWHERE, socket.gethostname()):
        try:
            address = address_towards(candidate) if candidate else ""
        except OSError:
            continue
        if address and not is_loopback(address):
            return address
    raise ConfigError(
        "the address at which other nodes reach this one cannot be told: it has no default route, and its host name leads to"
        " loopback; give its host name an address in /etc/hosts"
    )


def interface_of(address: str) -> str:
    """Return the name of the network interface that has `address`, or that of a name; empty when none has, or none is known."""
    try:
        address = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except OSError:
        return ""
    owners = psutil.net_if_addrs().items()
    return next((name for name, own in owners if any(each.address.partition("%")[0] == address for each in own)), "")
