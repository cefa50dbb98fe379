"""Real inference servers for tests: started on a free port, watched, and ended."""

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

from support.processes import find_free_port

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
def run_server(model: Path, *, log: Path, **overrides: str) -> Iterator[ServerProcess]:
    """
    Args:
        overrides: flags with underscores for dots, e.g. `max_num_seqs="4"`.
    """
    port = find_free_port()
    flags = {
        "model.name": str(model),
        "model.dtype": "float32",
        "model.enforce-eager": "true",
        "model.max-model-len": "1024",
        "cpu-kv-cache-gib": "0.125",
        "server.port": str(port),
        "output-dir": str(log.parent),
        **{name.replace("_", "-"): value for name, value in overrides.items()},
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "trivet.inference.server", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    server = ServerProcess(base_url=f"http://127.0.0.1:{port}", model=model, process=process, log=log)
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
