"""Starts real inference servers on free ports, watches and ends them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from support.processes import find_free_port
from trivet.client.inference_client import InferenceClient
from trivet.config.layout import SECRET_FILE, RunLayout
from trivet.process.sockets import ReservedPorts
from trivet.secret import make_secret
from trivet.wire.groups import server_root

_secret_files: dict[str, Path] = {}
"""Secret files of running servers, by address."""
START_TIMEOUT_S = 900
STOP_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    base_url: str
    model: Path
    process: subprocess.Popen[bytes]
    log: Path

    def engine_processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def run_server(model: Path, *, log: Path, module: str = "trivet.inference.main", **overrides: str) -> Iterator[ServerProcess]:
    """Start a server, wait until it is ready, and end it after the block. `overrides` are flags: `max_num_seqs="4"`.

    Its port is reserved, because it does not listen before its engine is ready. Without that, a server of another suite on this
    machine could get the port meanwhile and answer in its place, and this one would answer requests of that suite.
    """
    with ReservedPorts() as ports:
        yield from _run_server(model, ports.reserve("127.0.0.1", preferred=find_free_port()), log, module, overrides)


def _run_server(model: Path, port: int, log: Path, module: str, overrides: dict[str, str]) -> Iterator[ServerProcess]:
    flags = {
        "model.name": str(model),
        "model.dtype": "float32",
        "model.enforce-eager": "true",
        "model.max-model-len": "1024",
        "cpu-kv-cache-gib": "0.125",
        "server.port": str(port),
        "output-dir": str(log.parent),
        "server.weight-dirs": str(log.parent.parent),  # where pytest has the directories of all tests
        **{name.replace("_", "-"): value for name, value in overrides.items()},
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    server = ServerProcess(base_url=f"http://127.0.0.1:{port}", model=model, process=process, log=log)
    _secret_files[server.base_url] = RunLayout(log.parent).secret
    try:
        _wait_ready(server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def secret_file(base_url: str) -> Path:
    """Return the secret file of the run that the server belongs to."""
    return _secret_files[server_root(base_url)]


def bearer(base_url: str) -> dict[str, str]:
    """Return the header that lets a request change the server."""
    return {"Authorization": f"Bearer {make_secret(secret_file(base_url)).token}"}


def open_client(base_url: str, *, timeout_s: float) -> InferenceClient:
    """Return a client that may change the server."""
    return InferenceClient(base_url, timeout_s=timeout_s, find_token=lambda: make_secret(secret_file(base_url)).token)


@contextmanager
def secret_shared(server: ServerProcess) -> Iterator[None]:
    """Give commands that are started within the block the server's secret, although they did not start it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_FILE, str(secret_file(server.base_url)))
        yield


def reload_weights(base_url: str) -> None:
    """Have the server load its start weights again."""
    httpx.post(f"{base_url}/reload_weights", headers=bearer(base_url), timeout=240).raise_for_status()


def _wait_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, (
            f"server ended with {server.process.returncode}:\n{server.log.read_text()[-4000:]}"
        )
        try:
            if httpx.get(f"{server.base_url}/health", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"not ready within {START_TIMEOUT_S} s:\n{server.log.read_text()[-4000:]}")
