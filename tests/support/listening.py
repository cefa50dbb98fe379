"""Lists the sockets on which processes listen, as the kernel knows them."""

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    protocol: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listeners_of(pids: Iterable[int]) -> set[Listener]:
    """Return TCP sockets that listen, and UDP sockets that are bound and not connected."""
    table = dict(_read_tables())
    return {table[inode] for pid in pids for inode in _socket_inodes(pid) if inode in table}


def _socket_inodes(pid: int) -> Iterator[int]:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                yield int(target[8:-1])
    except OSError:  # it ended, or closed the file, while we looked
        return


def _read_tables() -> Iterator[tuple[int, Listener]]:
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            is_open = state == _LISTEN if protocol.startswith("tcp") else remote.endswith(":0000")
            if is_open:
                host, port = local.split(":")
                yield int(rest[5]), Listener(protocol, _address(host), int(port, 16))


def _address(hexadecimal: str) -> str:
    words = [struct.pack("=I", int(hexadecimal[start : start + 8], 16)) for start in range(0, len(hexadecimal), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
