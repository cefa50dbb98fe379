import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_roles import FakeAttempts, FakeChild, make_spec, write_report
from support.processes import find_free_port
from trivet.config.layout import RunLayout
from trivet.exits import NODE_LOST
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.reports import read_reports
from trivet.launcher.supervision.role_processes import ReadyProbe, RoleProcess, UnitProgress
from trivet.wire.status import RUNNING_GROUPS
from trivet.wire.versions import Step

INFERENCE_UNIT = RecoveryUnit("inference")


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
    monkeypatch.setattr("trivet.launcher.supervision.role_processes._ANSWER_TIMEOUT_S", 60.0)


def test_a_server_is_told_once_and_after_a_restart_again(server: str) -> None:
    probe = ReadyProbe([server])
    assert not probe.are_all_ready
    assert probe.poll(now=1) == [server]
    assert probe.are_all_ready
    assert probe.poll(now=100) == []
    probe.restart([server])
    assert not probe.are_all_ready
    assert probe.poll(now=200) == [server]


def test_a_server_that_does_not_answer_is_asked_again_after_a_while(server: str) -> None:
    absent = f"http://127.0.0.1:{find_free_port()}/v1"
    probe = ReadyProbe([absent, server])
    assert probe.poll(now=10) == [server]
    assert probe.poll(now=10.5) == []
    assert probe.poll(now=20) == []
    assert not probe.are_all_ready


def test_a_server_has_progressed_when_it_answers_and_not_after_a_restart(server: str, tmp_path: Path) -> None:
    progress = UnitProgress(FakeAttempts(layout=RunLayout(tmp_path), urls=[server]), {})
    assert not progress.has_progressed(INFERENCE_UNIT)
    assert list(progress.poll(now=10)) == [(INFERENCE_UNIT, server)]
    assert progress.has_progressed(INFERENCE_UNIT)
    progress.restart(INFERENCE_UNIT)
    assert not progress.has_progressed(INFERENCE_UNIT)


def test_a_server_that_has_ended_is_not_asked(server: str, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    child = FakeChild(spec=make_spec(layout, "inference"), pid=1)
    role = RoleProcess(child, now=0.0)
    progress = UnitProgress(FakeAttempts(layout=layout, urls=[server]), {"inference": role})
    child.exit_code = NODE_LOST
    role.poll(now=1.0, is_complete=lambda _: False)
    assert list(progress.poll(now=10)) == []
    progress = UnitProgress(FakeAttempts(layout=layout, urls=[server]), {"inference": RoleProcess(child, now=0.0)})
    assert list(progress.poll(now=20)) == [(INFERENCE_UNIT, server)]


def test_training_has_progressed_when_a_step_after_that_resumed_from_is_done(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    attempts = FakeAttempts(layout=layout, from_step=Step(6))
    roles: dict[str, RoleProcess] = {}
    progress = UnitProgress(attempts, roles)
    assert progress.last_step() == 0
    roles["trainer"] = RoleProcess(FakeChild(spec=make_spec(layout, "trainer"), pid=1), now=0.0)
    for step, has_progressed in ((6, False), (7, True)):
        write_report(layout, "trainer", step=step)
        roles["trainer"].reports = read_reports(roles["trainer"].child.spec.reports)
        assert progress.has_progressed(TRAINING) is has_progressed


def test_environment_workers_have_progressed_when_they_run_groups_whatever_the_trainer_has_done(tmp_path: Path) -> None:
    layout, unit = RunLayout(tmp_path), RecoveryUnit("env-workers-1")
    child = FakeChild(spec=replace(make_spec(layout, unit), unit=unit), pid=1)
    roles = {unit: RoleProcess(child, now=0.0)}
    progress = UnitProgress(FakeAttempts(layout=layout), roles)
    for activity, has_progressed in (("loading environments", False), (RUNNING_GROUPS, True)):
        write_report(layout, unit, activity=activity, step=7)
        roles[unit].reports = read_reports(child.spec.reports)
        assert progress.has_progressed(unit) is has_progressed
