"""Servers that begin to answer are told once, and anew after a restart."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from support.processes import find_free_port
from trivet.launcher.supervision.readiness import ReadyProbe


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}/v1"
        served.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _answers_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.launcher.supervision.readiness._TIMEOUT_S", 60.0)


def test_a_server_is_told_once_and_after_a_restart_again(server: str) -> None:
    probe = ReadyProbe([server])
    assert not probe.are_all_ready
    assert probe.look(now=1) == [server]
    assert probe.are_all_ready
    assert probe.look(now=100) == []
    probe.again()
    assert not probe.are_all_ready
    assert probe.look(now=200) == [server]


def test_a_server_that_does_not_answer_is_asked_again_after_a_while(server: str) -> None:
    absent = f"http://127.0.0.1:{find_free_port()}/v1"
    probe = ReadyProbe([absent, server])
    assert probe.look(now=10) == [server]
    assert probe.look(now=10.5) == []
    assert probe.look(now=20) == []
    assert not probe.are_all_ready
