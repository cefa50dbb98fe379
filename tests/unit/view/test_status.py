import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from trivet.cli.main import main
from trivet.config.layout import RunLayout
from trivet.view.status import StatusClock, describe_role, describe_run, is_over, read_status, watch_status
from trivet.wire.status import ProcessReport, RestartRecord, RoleState, RoleStatus, RunState, RunStatus, WorkerStatus
from trivet.wire.versions import PolicyVersion, Step

NOW = 10_000.0


def report(role: str, **fields: object) -> ProcessReport:
    return ProcessReport(**{"role": role, "pid": 7, "time": NOW, "since": NOW, **fields})  # type: ignore[arg-type]  # of several types


def role(name: str, *reports: ProcessReport, **fields: object) -> RoleStatus:
    return RoleStatus(**{"name": name, "state": RoleState.RUNNING, "pid": 7, "reports": list(reports), **fields})  # type: ignore[arg-type]  # of several types


def status(*roles: RoleStatus, **fields: object) -> RunStatus:
    given = {"run_id": "r", "attempt": 2, "pid": 5, "state": RunState.RUNNING, "started": NOW - 30, "time": NOW}
    return RunStatus(**{**given, "roles": list(roles), **fields})  # type: ignore[arg-type]  # of several types


def words(told: RunStatus, *, is_alive: bool = True) -> str:
    return "\n".join(describe_run(told, layout=RunLayout(Path("out")), now=NOW, is_alive=lambda _: is_alive))


RANKS = [report("trainer", rank=rank, num_ranks=2, activity="training step 3", since=NOW - 2) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("described", "lines"),
    [
        (
            role("trainer", report("trainer", activity="batch 12", waits_for="orchestrator", since=NOW - 41)),
            ["trainer has waited 41 s for batch 12 (from orchestrator)"],
        ),
        (
            role("trainer", *RANKS),
            [f"trainer rank {rank} of 2 alive, training step 3 for 2 s" for rank in (0, 1)],
        ),
        (
            role("inference-1", report("inference-1", activity="serving"), node=2),
            ["inference-1 (node 2) alive, serving for 0 s"],
        ),
        (
            role("trainer", report("trainer", activity="step 3", time=NOW - 70, since=NOW - 75), stuck="no report for 60 s"),
            ["trainer is stuck: no report for 60 s", "trainer alive, step 3 for 5 s; it has not reported for 70 s"],
        ),
    ],
    ids=["waits", "ranks", "another node", "old report"],
)
def test_a_role_is_described_by_what_its_processes_report(described: RoleStatus, lines: list[str]) -> None:
    assert list(describe_role(described, now=NOW)) == lines


@pytest.mark.parametrize(
    ("fields", "is_alive", "part", "can_go_on"),
    [
        ({"state": RunState.DONE, "exit_code": 0}, True, "done with exit code 0", False),
        ({"time": NOW - 60}, False, "its launcher was killed, last heard of 60 s ago", True),
        ({"time": NOW - 60}, True, "there but silent", False),
    ],
    ids=["done", "killed launcher", "stopped launcher"],
)
def test_a_run_that_does_not_go_on_is_told_how_it_ended(
    fields: dict[str, object], is_alive: bool, part: str, can_go_on: bool
) -> None:
    text = words(status(last_commit=Step(5), **fields), is_alive=is_alive)
    assert part in text
    assert ("go on from step 5" in text) == can_go_on


def test_workers_in_their_own_code_for_long_are_counted_by_environment() -> None:
    workers = [WorkerStatus(env="x", pid=index, num_pending=1, scoring_for_s=99.0 if index else 0.0) for index in range(4)]
    text = words(status(role("orchestrator", report("orchestrator", activity="filling batch 2", workers=workers))))
    assert "env `x`: 3 of 4 workers stuck in scoring, 4 groups pending" in text


def test_a_running_run_is_told_with_step_policy_and_commit() -> None:
    orchestrator = report(
        "orchestrator", activity="filling batch 8", policy_version=PolicyVersion(6), num_ready=2, num_in_flight=5
    )
    trainer = report("trainer", activity="training step 7", step=Step(6))
    text = words(status(role("orchestrator", orchestrator), role("trainer", trainer), max_steps=12, last_commit=Step(5)))
    assert text.splitlines()[0] == "run r attempt 2: running for 30 s; step 6 of 12, last commit step 5"
    assert "orchestrator alive, filling batch 8 for 0 s; policy 6 served; 2 groups ready; 5 in flight" in text
    assert "go on from" not in text


def test_a_failed_run_is_told_with_its_restarts_its_error_and_how_to_go_on() -> None:
    restart = RestartRecord(
        time=NOW,
        roles=["orchestrator", "trainer"],
        cause="trainer killed by SIGKILL",
        from_step=Step(5),
        lost_steps=2,
        down_s=14.0,
    )
    text = words(
        status(
            state=RunState.FAILED,
            exit_code=1,
            reason="trainer failed",
            last_error="boom",
            restarts=[restart],
            last_commit=Step(5),
        )
    )
    assert "failed with exit code 1" in text
    assert "trainer killed by SIGKILL: orchestrator and trainer restarted from step 5 (2 steps again), back after 14 s" in text
    assert "  boom" in text
    assert "go on from step 5: the same command with --ckpt.resume-step -1, of vf-rl with " in text


def test_no_process_is_called_alive_that_is_gone() -> None:
    workers = [WorkerStatus(env="x", pid=8)]
    here = role("orchestrator", report("orchestrator", activity="filling batch 2", workers=workers))
    elsewhere = role("inference-1", report("inference-1", activity="serving"), node=1)
    text = words(status(here, elsewhere, node=os.uname().nodename, time=NOW), is_alive=False)
    assert "orchestrator is gone (pid 7)" in text
    assert "env `x`" not in text
    assert "inference-1 (node 1) alive" in text


class Viewer:
    """Reads a run's status on a machine on which every process id exists, with a clock of its own."""

    def __init__(self, layout: RunLayout, *, unix_time: float, is_written: bool) -> None:
        self.layout = layout
        self.passed = 0.0
        self._is_written = is_written
        self.clock = StatusClock(unix_time=lambda: unix_time + self.passed, monotonic=lambda: self.passed)
        self.write()

    def write(self) -> None:
        told = status(node="host-b", time=NOW + self.passed, last_commit=Step(5))
        self.layout.status.write_bytes(msgspec.json.encode(told))

    def sleep(self, seconds: float) -> None:
        self.passed += seconds
        if self._is_written and self.passed % 2 == 0:
            self.write()

    def look(self) -> str:
        told = watch_status(self.layout, self.clock, sleep=self.sleep)
        now = self.clock.now(told)
        text = "\n".join(describe_run(told, layout=self.layout, now=now, is_alive=lambda _: True))
        assert is_over(told, now=now, is_alive=lambda _: True) == ("go on from" in text)
        return text


@pytest.mark.parametrize("unix_time", [NOW - 3600.0, NOW, NOW + 3600.0])
def test_a_run_on_another_machine_is_judged_by_whether_its_status_changes(tmp_path: Path, unix_time: float) -> None:
    """Its clock may differ, and its process id is that of some other process here."""
    viewer = Viewer(RunLayout(tmp_path), unix_time=unix_time, is_written=True)
    assert "running for 32 s" in viewer.look()
    assert viewer.passed == 2.0
    viewer = Viewer(RunLayout(tmp_path), unix_time=unix_time, is_written=False)
    assert "its launcher (pid 5 on host-b) has written no status for at least 16 s" in viewer.look()


def test_a_run_on_this_machine_is_told_without_a_wait(tmp_path: Path) -> None:
    layout, clock = RunLayout(tmp_path), StatusClock(unix_time=lambda: NOW + 60.0)
    told = status(node=os.uname().nodename)
    layout.status.write_bytes(msgspec.json.encode(told))
    assert clock.now(watch_status(layout, clock, sleep=pytest.fail)) == NOW + 60.0
    assert "there but silent" in words(msgspec.structs.replace(told, time=NOW - 60.0))


def test_the_raw_status_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunLayout(tmp_path).status.write_bytes(msgspec.json.encode(status()))
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "r"


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("", b"", "holds no run"),
        ("status.json", b"{", "cannot be read"),
        ("status.json", b'{"x":' + DEEP + b"]" * 100_000 + b"}", "cannot be read"),
        ("report", b"{", "cannot be read"),
        ("report", b'{"role": "\xff"}', "cannot be read"),
        ("report", DEEP, "cannot be read"),
    ],
    ids=["nothing", "torn status", "deep status", "torn report", "no text", "deep report"],
)
def test_a_directory_without_a_status_that_can_be_read_is_refused(
    name: str, content: bytes, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name:
        path = RunLayout(tmp_path).report_file("trainer") if name == "report" else tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert main(["status", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_roles_started_by_hand_are_told_from_their_own_reports(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.reports.mkdir()
    for rank in (0, 1):
        layout.report_file("trainer", rank).write_bytes(msgspec.json.encode(report("trainer", rank=rank, num_ranks=2)))
    found = read_status(layout)
    assert [(found_role.name, len(found_role.reports)) for found_role in found.roles] == [("trainer", 2)]


def test_what_a_terminal_obeys_is_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = status(last_error="\x1b]0;title\x07 and \x1b[2J", run_id="r\x1b[31m")
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(told))
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    assert r"\x1b[2J" in said


@pytest.mark.parametrize(
    "fields", [{"time": 1e308}, {"started": -1e308}, {"time": -1e308, "pid": 2**60}, {"pid": 2**40, "time": 0.0}]
)
@pytest.mark.parametrize("exit_code", [None, 1])
def test_numbers_that_no_machine_has_are_told(
    fields: dict[str, object], exit_code: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(status(exit_code=exit_code, **fields)))
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert len(said) < 1000
    assert re.search(r"\d{20}", said) is None, "a length of time in hundreds of digits"


def test_an_error_is_shown_until_the_run_has_recovered_from_it() -> None:
    restart = RestartRecord(time=NOW, roles=["trainer"], cause="trainer killed by SIGKILL", from_step=Step(1))
    back = msgspec.structs.replace(restart, down_s=14.0)
    assert "last error:" in words(status(last_error="boom", restarts=[back, restart]))
    assert "last error:" not in words(status(last_error="boom", restarts=[back, back]))
    assert "last error:" not in words(status(last_error="boom", restarts=[back], state=RunState.DONE, exit_code=0))
    assert "last error:" in words(status(last_error="boom", restarts=[back], state=RunState.FAILED, exit_code=1))


def test_a_directory_above_runs_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs").mkdir()
    for name in ("first", "second"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "run.json").write_text("{}")
    assert main(["view", str(tmp_path)]) == 2
    assert f"for example {tmp_path}/outputs/first or {tmp_path}/outputs/second" in capsys.readouterr().err
