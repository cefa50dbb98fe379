"""A link of limited rate between two nodes of one machine, for `weight_transports.py`. Needs root and the command `tc`."""

import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Link:
    """A veth pair from this namespace, the trainer's node, to a new one, the server's node."""

    near, far = "10.213.7.1", "10.213.7.2"

    def __init__(self) -> None:
        self.namespace = f"trivet-bench-{secrets.token_hex(3)}"
        self._device = f"tvb{secrets.token_hex(3)}"

    def __enter__(self) -> "Link":
        _run("ip", "netns", "add", self.namespace)
        _run("ip", "link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _run("ip", "address", "add", f"{self.near}/30", "dev", self._device)
        _run("ip", "link", "set", self._device, "up")
        _run("ip", "-n", self.namespace, "address", "add", f"{self.far}/30", "dev", "eth0")
        for device in ("eth0", "lo"):
            _run("ip", "-n", self.namespace, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        _run("ip", "netns", "delete", self.namespace)  # and the veth pair with it

    def limit(self, gbit: float) -> None:
        """Limit the rate towards the server's node to `gbit` Gbit/s."""
        # The bucket holds what comes in 4 ms, the time between two ticks of a kernel with 250 Hz.
        words = ["rate", f"{gbit}gbit", "burst", str(max(1 << 18, round(gbit * 1e9 / 8 * 0.004))), "latency", "20ms"]
        _run("tc", "qdisc", "replace", "dev", self._device, "root", "tbf", *words)

    def inside(self, *command: str | Path) -> list[str]:
        """Return the command that runs `command` on the server's node."""
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def serving_files(address: str) -> Iterator[str]:
    """Answer requests for files by their absolute paths with the bytes alone; yield the URL."""
    with socket.create_server((address, 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # the socket was closed
                while True:
                    connection, _ = server.accept()
                    with connection:
                        path = connection.recv(1 << 16).split(b" ")[1].decode()
                        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                        with Path(path).open("rb") as file:
                            connection.sendfile(file)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://{address}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def copy_plainly(link: Link, directory: Path, to: Path) -> float:
    """Copy the weight files of a policy over the link with curl; return the seconds."""
    seconds = 0.0
    with serving_files(link.near) as url:
        for path in sorted(directory.glob("*.safetensors")):
            started = time.perf_counter()
            subprocess.run(link.inside("curl", "-sf", "-o", to, f"{url}{path}"), check=True)
            seconds += time.perf_counter() - started
            to.unlink()
    return seconds
