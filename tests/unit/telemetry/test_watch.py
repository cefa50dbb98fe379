import logging
import threading

import httpx
import pytest

from trivet.config.schema.shared import DetectorsConfig
from trivet.errors import Diverged
from trivet.telemetry.detectors import make_detectors
from trivet.telemetry.telemetry import Heartbeat, check_step

URL = "http://me:planted-1@monitor.test/planted-2"
EMPTY = {"batch/loss_tokens": 0.0}


def test_a_heartbeat_is_a_get_request_and_a_slow_service_does_not_hold_up_a_step():
    release, calls = threading.Event(), []

    def answer(request):
        calls.append(request)
        release.wait(10)
        return httpx.Response(200)

    heartbeat = Heartbeat(URL, transport=httpx.MockTransport(answer))
    for _ in range(3):
        heartbeat.send()
    release.set()
    heartbeat.close()
    assert [(request.method, str(request.url)) for request in calls] == [("GET", URL)]


@pytest.mark.parametrize("status", [302, 503])
def test_an_answer_that_is_no_success_is_said_once_without_the_address(caplog, status):
    """Anyone who knows the address can call it, so it stays out of the log."""
    transport = httpx.MockTransport(lambda request: httpx.Response(status, headers={"Location": "/planted-3"}))
    heartbeat = Heartbeat(URL, transport=transport)
    for _ in range(3):
        heartbeat.send()
        heartbeat._call.join()
    heartbeat.close()
    assert len(caplog.records) == 1
    assert f"answered {status}" in caplog.text
    assert "planted" not in caplog.text
    assert "monitor.test" not in caplog.text


@pytest.mark.parametrize(("reaction", "num_warnings"), [("warn", 1), ("off", 0)])
def test_a_detector_warns_with_the_step_and_its_key_or_is_off(caplog, reaction, num_warnings):
    with caplog.at_level(logging.WARNING):
        check_step(make_detectors(DetectorsConfig(no_loss_tokens=reaction)), 4, EMPTY)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == num_warnings
    assert all(line.startswith("step 4: no token") and line.endswith("(detectors.no_loss_tokens)") for line in lines)


def test_a_detector_may_end_the_run_with_exit_code_3():
    with pytest.raises(Diverged, match=r'step 4: .* \(detectors.no_loss_tokens = "stop"\)') as caught:
        check_step(make_detectors(DetectorsConfig(no_loss_tokens="stop")), 4, EMPTY)
    assert caught.value.exit_code == 3


def test_every_detector_has_a_key():
    reactions = [name for name, value in DetectorsConfig() if value == "warn"]
    assert sorted(detector.name for detector in make_detectors(DetectorsConfig())) == sorted(reactions)
