"""Finds out at which address other nodes reach this one, and through which network interface."""

import fcntl
import socket
import struct
from pathlib import Path

from trivet.errors import ConfigError

_SIOCGIFADDR = 0x8915
"""The ioctl that asks for an interface's IPv4 address."""
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_ELSEWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737). A route to it is the default route; nothing is sent."""
_ANY_PORT = 9


def address_towards(host: str) -> str:
    """Return the address of the interface through which this node reaches `host`. Nothing is sent.

    Raises:
        OSError: `host` is not known, or there is no way there.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


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
        if address and not _is_loopback(address):
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
    if ":" in address:
        digits = socket.inet_pton(socket.AF_INET6, address).hex()
        lines = _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else []
        return next((line.split()[-1] for line in lines if line.startswith(digits)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
