"""Test the origin as the launcher starts it: a process with a port of its own."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.policy_servers import publish_files
from support.processes import find_free_port, wait_until
from trivet.config.layout import RunLayout
from trivet.launcher.supervision.observer import is_healthy
from trivet.secret import make_secret
from trivet.telemetry.process_report import read_report
from trivet.weights.fetch import PolicyCache
from trivet.weights.manifest import offer_policy, verify
from trivet.wire.versions import FetchablePolicy


@contextmanager
def serving(layout: RunLayout, port: int) -> Iterator[subprocess.Popen[bytes]]:
    config = layout.root / "trainer.toml"
    config.write_text(f'output_dir = "{layout.root}"\n[weights]\ntransport = "http"\norigin = {{ port = {port} }}\n')
    with (layout.root / "origin.out").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "trivet.origin", "@", str(config)], stdout=log, stderr=log)
    try:
        wait_until(lambda: is_healthy(f"http://127.0.0.1:{port}"), timeout_s=120, waiting_for="the origin")
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_fetch_survives_the_origin_being_killed_in_the_middle_of_a_file(tmp_path: Path) -> None:
    layout, port = RunLayout(tmp_path), find_free_port()
    directory = publish_files(layout, 1, model=bytes(range(256)) * (1 << 17))  # more than the connection holds
    token, url = make_secret(layout.secret).token, f"http://127.0.0.1:{port}"
    is_half_read, starts = threading.Event(), list[int]()

    class Watched(PolicyCache):
        """Waits with a part of the file written until the origin is dead, and notes the sizes after."""

        def _require_wanted(self, policy: FetchablePolicy) -> None:
            super()._require_wanted(policy)
            sizes = [path.stat().st_size for path in self.directory.glob(".step_1.*/model.safetensors.partial")]
            if sizes and sizes[0]:
                if not is_half_read.is_set():
                    is_half_read.set()
                    first.wait(60)
                starts.append(sizes[0])

    cache = Watched(tmp_path / "cache", run="run", token=token, environ={})
    fetched: list[Path] = []
    policy = offer_policy(directory, sources=[url])
    thread = threading.Thread(target=lambda: fetched.append(cache.fetch(policy, max_bytes=1 << 30)))
    with serving(layout, port) as first:
        thread.start()
        assert is_half_read.wait(60)
        first.kill()
    with serving(layout, port):
        thread.join(110)
    assert [verify(path).digest for path in fetched] == [policy.digest]
    assert starts == sorted(starts), "nothing was fetched twice"
    assert starts[0] < directory.joinpath("model.safetensors").stat().st_size / 2
    cache.close()


def test_the_origin_reports_serves_only_with_the_secret_and_ends_on_a_signal(tmp_path: Path) -> None:
    layout, port = RunLayout(tmp_path), find_free_port()
    digest = verify(publish_files(layout, 1, model=b"x")).digest
    with serving(layout, port) as process:
        url = f"http://127.0.0.1:{port}/weights/1/{digest}/model.safetensors"
        assert httpx.get(url).status_code == 401
        bearer = {"Authorization": f"Bearer {make_secret(layout.secret).token}"}
        assert httpx.get(url, headers=bearer).content == b"x"
        assert httpx.post(url, headers=bearer).status_code == 405
        report = read_report(layout.report_file("origin"))
        assert report is not None
        assert (report.pid, report.role) == (process.pid, "origin")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (-signal.SIGTERM, 128 + signal.SIGTERM, 0)


@pytest.mark.parametrize("key", ["weights.origin.host", "weights.origin.max_transfers"])
def test_values_that_cannot_be_used_are_refused(tmp_path: Path, key: str) -> None:
    flags = ["--output-dir", str(tmp_path), f"--{key}", "0" if key.endswith("transfers") else "192.0.2.1"]
    ended = subprocess.run(
        [sys.executable, "-m", "trivet.origin", *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2
    assert key.rpartition(".")[0] in ended.stderr
