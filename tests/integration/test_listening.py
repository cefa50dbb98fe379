"""No process of a run listens beyond loopback, by the kernel's list of every socket."""

import ipaddress
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support.processes import descendants_of
from support.rl_run import Run
from trivet.config.layout import STABLE
from trivet.launcher.plan import rank_command, rank_environment
from trivet.secret import read_secret

MAX_STEPS = 2
RANKS = 2
TRAINED_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    protocol: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listeners_of(pid: int) -> set[Listener]:
    """Return TCP sockets that listen, and UDP sockets that are bound and not connected."""
    with suppress(psutil.NoSuchProcess):
        return {
            Listener("tcp" if socket_.type == socket.SOCK_STREAM else "udp", socket_.laddr.ip, socket_.laddr.port)
            for socket_ in psutil.Process(pid).net_connections("inet")
            if socket_.status == psutil.CONN_LISTEN or (socket_.type == socket.SOCK_DGRAM and not socket_.raddr)
        }
    return set()


class Watch:
    """Collects the sockets of all processes below a launcher, from their first moment to their last."""

    def __init__(self, pid: int) -> None:
        self.found: dict[Listener, str] = {}
        """Sockets, each with the command line of a process that listens there."""
        self.num_looks = 0
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch-sockets")

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            self.num_looks += 1
            for pid in [self._pid, *(process.pid for process in descendants_of(self._pid))]:
                for listener in listeners_of(pid):
                    self.found.setdefault(listener, command_of(pid))


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return "ended"
    return " ".join(words)[-200:]


def test_the_list_tells_what_listens_on_loopback_from_what_listens_everywhere() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as here,
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.create_server(("::", 0), family=socket.AF_INET6) as on_both,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(("0.0.0.0", 0))
        found = {(listener.protocol, listener.port): listener.is_loopback for listener in listeners_of(os.getpid())}
        for protocol, sock, is_loopback in (
            ("tcp", here, True),
            ("tcp", everywhere, False),
            ("tcp", on_both, False),
            ("udp", datagrams, False),
        ):
            assert found[protocol, sock.getsockname()[1]] is is_loopback


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_by_themselves_listen_on_loopback_alone(num_ranks: int, tiny_model: Path, tmp_path: Path) -> None:
    flags = {"model.name": tiny_model, "model.compute-dtype": "float32", "model.seq-len": 64, "max-steps": 2}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--output-dir", str(tmp_path / "run"), "--data.fake.batch-size", "4", "--device", "cpu"]
    with (tmp_path / "trainer.log").open("wb") as log:
        starter = subprocess.Popen(
            rank_command(sys.executable, "trivet.trainer.main", words, num_ranks=num_ranks, is_on_cpu=True),
            env=os.environ | rank_environment(num_ranks, num_cpus=2, is_on_cpu=True),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        with Watch(starter.pid) as watch:
            code = starter.wait(TRAINED_WITHIN_S)
    finally:
        starter.kill()
        starter.wait()
    assert code == 0, (tmp_path / "trainer.log").read_text()[-3000:]
    print(*sorted(watch.found), sep="\n")
    assert all(listener.is_loopback for listener in watch.found)
    assert len(watch.found) >= num_ranks


@pytest.mark.vllm
def test_a_run_with_two_ranks_listens_on_loopback_alone_and_keeps_its_secret(make_run: Callable[..., Run]) -> None:
    run = make_run(max_steps=MAX_STEPS)
    launcher = run.start("--trainer-cpu-ranks", str(RANKS))
    with Watch(launcher.pid) as watch:
        run.wait_for(run.layout.weights_step(1) / STABLE)
        assert run.await_exit() == 0, run.output[-4000:]
    print(f"{watch.num_looks} looks; what the run listened on:")
    for listener, command in sorted(watch.found.items()):
        print(f"  {listener.protocol} {listener.address}:{listener.port}  {command}")
    beyond = {listener: command for listener, command in watch.found.items() if not listener.is_loopback}
    assert not beyond
    assert len(watch.found) >= 2 + RANKS, "server, transport, and a socket of gloo in each rank"
    assert_secret_is_nowhere(run)


def assert_secret_is_nowhere(run: Run) -> None:
    """Check that only the secret's own file holds it after the run."""
    secret = run.layout.secret
    assert secret.stat().st_mode & 0o777 == 0o600
    token = read_secret(secret).token
    words = [token.encode(), bytes.fromhex(token)]
    files = [path for path in run.layout.root.parent.rglob("*") if path.is_file() and path != secret]
    assert len(files) > 20
    assert [path for path in files if any(word in path.read_bytes() for word in words)] == []
