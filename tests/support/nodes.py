"""The network of the machines in `support.ray_nodes`: a namespace for each, and a switch whose ports can be pulled.

Needs root and `ip`.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.processes import wait_until

LINK_PROGRAM = Path(__file__).with_name("link_program.py")
_NO_OFFLOADS = """
import fcntl, socket, struct, array
for command in (0x17, 0x1F, 0x24):  # transmit checksums, TCP segments, other segments: linux/ethtool.h
    value = array.array("I", [command, 0])
    request = struct.pack("16sP", b"eth0", value.buffer_info()[0])
    fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8946, request)
"""


def can_make_nodes() -> bool:
    """Return whether this process may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Nodes:
    """Nodes 0 to `count` - 1 with addresses 10.214.0.1 and so on, in a network that nothing else is connected to."""

    def __init__(self, count: int) -> None:
        self.name = f"trivet-{secrets.token_hex(3)}"
        self.count = count
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _namespace(self, node: int) -> str:
        return f"{self.name}-{node}"

    def make(self) -> None:
        for namespace in (self._switch, *map(self._namespace, range(self.count))):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for node in range(self.count):
            namespace, port = self._namespace(node), f"port{node}"
            peer = ("peer", "name", "eth0", "netns", namespace)
            _ip("-n", self._switch, "link", "add", port, "type", "veth", *peer)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge")
            _ip("-n", self._switch, "link", "set", port, "up")
            _ip("-n", namespace, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            # A frame that a program passes on must carry its checksum, and fit: veth leaves both to a card that there is not.
            subprocess.run(["ip", "netns", "exec", namespace, sys.executable, "-c", _NO_OFFLOADS], check=True)
            _ip("-n", namespace, "route", "add", "default", "dev", "eth0")

    def address(self, node: int) -> str:
        return f"10.214.0.{node + 1}"

    def pids(self, node: int) -> list[int]:
        """Return the processes of a node."""
        listed = subprocess.run(["ip", "netns", "pids", self._namespace(node)], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def disconnect(self, node: int) -> None:
        """Pull the node's cable."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def connect(self, node: int) -> None:
        """Put the cable back."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "up")

    @contextmanager
    def worse(self, node: int, *, loss: float = 0.0, delay_s: float = 0.0) -> Iterator[None]:
        """Give the node a bad cable for a block: a share of the frames is lost, or each comes late, in both directions."""
        port, near, far = f"port{node}", f"near{node}", f"far{node}"
        _ip("-n", self._switch, "link", "set", port, "nomaster")
        _ip("-n", self._switch, "link", "add", near, "type", "veth", "peer", "name", far)
        for link in (near, far):
            _ip("-n", self._switch, "link", "set", link, "up")
        program = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._switch, sys.executable, str(LINK_PROGRAM)),
                *(port, near, "--loss", str(loss), "--delay", str(delay_s)),
            ],
            stdout=subprocess.PIPE,
        )
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"up\n"
            _ip("-n", self._switch, "link", "set", far, "master", "bridge")
            yield
        finally:
            program.terminate()
            program.wait(20)
            _ip("-n", self._switch, "link", "delete", near)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge")

    @contextmanager
    def silenced(self, node: int, towards: int) -> Iterator[None]:
        """Have nothing that one node sends reach another for a block, while the way back is open."""
        route = ("blackhole", f"{self.address(towards)}/32")
        _ip("-n", self._namespace(node), "route", "add", *route)
        try:
            yield
        finally:
            _ip("-n", self._namespace(node), "route", "delete", *route)

    def lose(self, node: int) -> None:
        """Lose a node: its connection, then all of its processes. Nothing of it can say farewell."""
        self.disconnect(node)
        self.kill(node)

    def kill(self, node: int) -> None:
        for pid in self.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.poll()
        wait_until(lambda: not self.pids(node), timeout_s=20, waiting_for=f"the end of node {node}")

    def remove(self) -> None:
        for node in range(self.count):
            with suppress(subprocess.CalledProcessError, AssertionError):
                self.kill(node)
        for namespace in (*map(self._namespace, range(self.count)), self._switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
