import threading

import httpx
import pytest

from trivet.telemetry.telemetry import Heartbeat

URL = "http://monitor.test/beat"


def test_a_beat_is_a_get_request():
    seen = []
    heartbeat = Heartbeat(URL, transport=httpx.MockTransport(lambda request: seen.append(request) or httpx.Response(200)))
    heartbeat.send()
    heartbeat.close()
    assert [(request.method, str(request.url)) for request in seen] == [("GET", URL)]


def test_a_service_that_is_down_is_said_once(caplog):
    heartbeat = Heartbeat(URL, transport=httpx.MockTransport(lambda request: httpx.Response(503)))
    for _ in range(3):
        heartbeat.send()
        heartbeat._call.join()
    heartbeat.close()
    assert len(caplog.records) == 1
    assert "heartbeat.url was not reached" in caplog.records[0].getMessage()


@pytest.mark.parametrize("status", [302, 404, 503])
def test_an_answer_that_is_no_success_is_said_without_the_address(caplog, status):
    """Anyone who knows the address can send beats, so it stays out of the log."""
    transport = httpx.MockTransport(lambda request: httpx.Response(status, headers={"Location": "/planted-3"}))
    heartbeat = Heartbeat("http://me:planted-1@monitor.test/planted-2", transport=transport)
    heartbeat.send()
    heartbeat.close()
    assert f"answered {status}" in caplog.text
    assert "planted" not in caplog.text
    assert "monitor.test" not in caplog.text


def test_a_slow_service_does_not_hold_up_a_step():
    release, calls = threading.Event(), []

    def answer(request):
        calls.append(request)
        release.wait(10)
        return httpx.Response(200)

    heartbeat = Heartbeat(URL, transport=httpx.MockTransport(answer))
    heartbeat.send()
    heartbeat.send()
    heartbeat.send()
    release.set()
    heartbeat.close()
    assert len(calls) == 1
