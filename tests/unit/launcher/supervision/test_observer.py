"""Observe roles that are only objects, and whose reports tests write, on a clock that tests move."""

import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from support.fake_roles import FakeAttempts, FakeChild, FakeClock, FakeHost, make_config, make_log, make_spec, write_report
from support.processes import find_free_port
from trivet.config.layout import RunLayout
from trivet.exits import NODE_LOST
from trivet.launcher.plan import TRAINING, RecoveryUnit, report_files
from trivet.launcher.processes import read_reports
from trivet.launcher.supervision.observer import FIRST_REPORT_S, Observer, describe
from trivet.process.signals import Interrupts
from trivet.wire.status import RUNNING_GROUPS, ProcessReport, WorkerStatus
from trivet.wire.versions import Step

TIMEOUT_S = 60.0
INFERENCE = RecoveryUnit("inference")
WORKER = WorkerStatus(env="reverse", pid=3, num_pending=2, num_generating=5, num_scoring=3)


class Observed:
    """A run, of which a trainer is observed every second."""

    def __init__(self, tmp_path: Path, *, urls: list[str] | None = None, num_ranks: int = 1, **recovery: object) -> None:
        self.layout = RunLayout(tmp_path)
        self.layout.logs.mkdir()
        self.clock, self.host = FakeClock(), FakeHost()
        self.log, self.written = make_log(tmp_path)
        config = make_config(**{"watchdog_timeout_s": TIMEOUT_S, **recovery})
        self.attempts = FakeAttempts(layout=self.layout, config=config, urls=urls or ())
        self.observer = Observer(self.attempts, host=self.host, log=self.log, clock=self.clock)
        self.found_stuck: list[str] = []
        spec = make_spec(self.layout, "trainer")
        self.trainer = FakeChild(spec=replace(spec, reports=report_files(self.layout, "trainer", num_ranks=num_ranks)), pid=7)
        self.observer.add(self.trainer)

    def passes(self, seconds: float, *, reports: bool = False, **fields: object) -> "Observed":
        """Observe each second; the trainer reports each time, if it does."""
        for _ in range(int(seconds)):
            if reports:
                write_report(self.layout, "trainer", pid=7, time=self.clock.now(), **fields)
            self.found_stuck += [role.name for role in self.observer.update()]
            self.clock.sleep(1)
        return self

    @property
    def stuck(self) -> str:
        return self.observer.roles["trainer"].stuck

    @property
    def text(self) -> str:
        return self.written.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Observed:
    return Observed(tmp_path)


def test_a_role_that_reports_is_not_stuck_however_long_it_waits(run: Observed) -> None:
    assert run.passes(300, reports=True).stuck == ""
    assert run.passes(TIMEOUT_S).stuck == ""
    assert run.passes(1).stuck == "trainer has not reported for 61 s"


def test_a_stuck_role_is_found_once_and_may_report_again(run: Observed) -> None:
    run.passes(5, reports=True).passes(2 * TIMEOUT_S)
    assert run.found_stuck == ["trainer"]
    assert run.passes(2, reports=True).stuck == ""
    assert "trainer reports again" in run.text


def test_one_silent_rank_of_several_is_named(tmp_path: Path) -> None:
    run = Observed(tmp_path, num_ranks=2)
    for rank in range(2):
        write_report(run.layout, "trainer", rank=rank)
    run.passes(70, reports=True)
    assert run.stuck == "trainer rank 1 of 2 has not reported for 69 s"


def test_a_role_that_has_not_reported_yet_has_longer_also_after_a_restart(run: Observed) -> None:
    assert run.passes(FIRST_REPORT_S).stuck == ""
    assert run.passes(2).stuck == "trainer has not reported since its start 301 s ago"
    run.observer.add(run.trainer)
    assert run.passes(FIRST_REPORT_S - 1).stuck == ""


def test_a_process_that_a_signal_stopped_is_named_although_the_role_reports(run: Observed) -> None:
    run.host.stopped.add(7)
    run.passes(50, reports=True)
    run.host.stopped.clear()
    run.passes(10, reports=True)
    run.host.stopped.add(7)
    assert run.passes(TIMEOUT_S, reports=True).stuck == ""
    assert "pid 7 stopped by a signal 69 s ago" in run.passes(10, reports=True).stuck


def test_time_in_which_the_launcher_itself_was_stopped_counts_for_nobody(tmp_path: Path) -> None:
    run = Observed(tmp_path, stall_warn_s=40).passes(10, reports=True)
    run.clock.sleep(3600)
    assert run.passes(25).stuck == ""
    assert "nothing has moved" not in run.text
    assert run.passes(TIMEOUT_S).stuck != ""
    assert "nothing has moved" in run.text


def test_a_stall_is_named_after_the_time_and_then_ever_more_rarely(tmp_path: Path) -> None:
    run = Observed(tmp_path, stall_warn_s=100).passes(150, reports=True)
    assert run.text.count("WARNING nothing has moved for 100 s") == 1
    assert run.trainer.shown == [7]
    run.passes(750, reports=True)
    assert [f"moved for {seconds} s" in run.text for seconds in (200, 400, 800)] == [True, True, True]
    assert run.text.count("WARNING nothing") == 4
    assert run.trainer.shown == [7], "what is written often would pass for a sign of life"
    assert run.stuck == ""


@pytest.mark.parametrize(
    ("change", "is_movement"),
    [
        ({"num_in_flight": 1}, True),
        ({"policy_version": 2}, True),
        ({"activity": "filling batch 4"}, True),
        ({"attempt": 2}, True),
        ({"workers": [msgspec.structs.replace(WORKER, num_generating=4)]}, True),
        ({"workers": [msgspec.structs.replace(WORKER, pid=4)]}, True),
        ({"workers": [msgspec.structs.replace(WORKER, scoring_for_s=99.0, blocked_for_s=99.0)]}, False),
    ],
)
def test_whatever_moves_but_the_time_starts_a_stall_anew(change: dict[str, object], is_movement: bool, tmp_path: Path) -> None:
    before: dict[str, object] = {"num_in_flight": 2, "workers": [WORKER], "activity": "filling batch 3"}
    run = Observed(tmp_path, stall_warn_s=100).passes(99, reports=True, **before)
    run.passes(50, reports=True, **(before | change))
    assert ("nothing has moved" in run.text) is not is_movement


def test_the_line_of_a_stall_says_who_waits_for_whom_and_where_the_groups_are() -> None:
    trainer = ProcessReport(role="trainer", pid=1, time=0, since=0, activity="batch 3", waits_for="orchestrator", num_ranks=2)
    orchestrator = ProcessReport(
        role="orchestrator", pid=2, time=0, since=0, activity="filling batch 3", num_ready=0, num_in_flight=2, workers=[WORKER]
    )
    assert describe([orchestrator, trainer]) == (
        "orchestrator: filling batch 3 with 2 groups in flight, 0 ready; "
        "environment reverse: 2 groups pending, 5 rollouts generating, 3 scoring; "
        "trainer rank 0: waits for batch 3 (from orchestrator)"
    )


def test_an_exit_is_observed_with_its_last_report_and_words_that_name_its_cause(run: Observed) -> None:
    run.passes(1, reports=True, step=6)
    write_report(run.layout, "trainer", step=7)
    run.trainer.spec.log.write_text("12:00:01 waited 17 s for pid 4711\n")
    run.trainer.exit_code = 1
    run.observer.update()
    seen = run.observer.observe(Interrupts()).roles["trainer"]
    assert (seen.exit_code, seen.ended_at, seen.is_complete, seen.has_progressed) == (1, run.clock.now(), False, True)
    assert seen.last_log_line == "waited # s for pid #"


def test_only_steps_of_this_attempt_after_that_resumed_from_are_progress(run: Observed) -> None:
    run.attempts.from_step = Step(6)
    for step, attempt, has_progressed in ((6, 1, False), (7, 1, True), (9, 2, False)):
        run.passes(1, reports=True, step=step, attempt=attempt)
        assert run.observer.has_progressed(TRAINING) is has_progressed


def test_environment_workers_have_progressed_when_they_run_groups_whatever_the_trainer_has_done(run: Observed) -> None:
    unit = RecoveryUnit("env-workers-1")
    run.observer.add(FakeChild(spec=replace(make_spec(run.layout, unit), unit=unit), pid=1))
    for activity, has_progressed in (("loading environments", False), (RUNNING_GROUPS, True)):
        write_report(run.layout, unit, activity=activity, step=7)
        run.passes(1)
        assert run.observer.has_progressed(unit) is has_progressed


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr("trivet.launcher.supervision.observer._ANSWER_TIMEOUT_S", 60.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}/v1"
        served.shutdown()
        thread.join()


def test_a_server_is_said_to_answer_once_and_after_a_restart_again(server: str, tmp_path: Path) -> None:
    run = Observed(tmp_path, urls=[server])
    assert not run.observer.is_answering(INFERENCE)
    assert run.passes(5).observer.has_progressed(INFERENCE)
    assert run.text.count(f"inference ready url={server}") == 1
    run.observer.restart(INFERENCE, names=["inference"])
    assert not run.observer.has_progressed(INFERENCE)
    assert run.passes(5).observer.is_answering(INFERENCE)


def test_a_unit_answers_when_all_its_servers_do_and_is_not_asked_once_it_has_ended(server: str, tmp_path: Path) -> None:
    absent = f"http://127.0.0.1:{find_free_port()}/v1"
    run = Observed(tmp_path, urls=[absent, server])
    assert not run.passes(5).observer.is_answering(INFERENCE)
    assert "ready url=" in run.text
    run.observer.restart(INFERENCE, names=["inference"])
    run.observer.add(FakeChild(spec=make_spec(run.layout, "inference"), pid=1, exit_code=NODE_LOST))
    assert run.passes(5).text.count("ready url=") == 1


def test_a_report_is_a_sign_of_life_even_if_it_cannot_be_read_until_it_is_forgotten(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    files = report_files(layout, "trainer", num_ranks=2)
    write_report(layout, "trainer", rank=1)
    layout.report_file("trainer", 0).write_text("{")
    reports = read_reports(files)
    assert all(stamp is not None for stamp in reports.stamps.values())
    assert [report.rank for report in reports.readable] == [1]
    for file in files:
        file.path.unlink()
    assert read_reports(files).stamps == {"trainer rank 0 of 2": None, "trainer rank 1 of 2": None}
