"""Supervise whole runs whose roles are only objects, on a clock that moves when the supervisor sleeps."""

import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from support.fake_roles import FakeAttempts, FakeChild, FakeClock, FakeHost, make_config, write_report
from trivet.config.layout import RunLayout
from trivet.errors import CheckpointError, NodesMissing, RunDirectoryBusy, TrivetError
from trivet.exits import NODE_LOST
from trivet.launcher.logs import RunLog
from trivet.launcher.supervision.supervisor import Supervisor
from trivet.wire.events import Restart
from trivet.wire.status import RunState, RunStatus
from trivet.wire.versions import Step


class SimulatedRun:
    """A run as events at seconds after its start."""

    def __init__(self, tmp_path: Path, *, urls: Sequence[str] = (), **recovery: object) -> None:
        self.layout = RunLayout(tmp_path)
        self.layout.logs.mkdir()
        self.clock = FakeClock()
        self.host = FakeHost(clock=self.clock)
        self.attempts = FakeAttempts(layout=self.layout, config=make_config(**{"backoff_s": 4, **recovery}), urls=urls)
        self.written = io.StringIO()
        self.supervisor = Supervisor(
            self.attempts,
            host=self.host,
            log=RunLog(io.StringIO(), self.written),
            clock=self.clock,
        )

    def at(self, seconds: float, happens: Callable[[], object]) -> "SimulatedRun":
        self.clock.planned.append((100.0 + seconds, happens))
        return self

    def ends(self, name: str, code: int, *, at: float) -> "SimulatedRun":
        def end() -> None:
            self.newest(name).exit_code = code

        return self.at(at, end)

    def completes(self, *, at: float) -> "SimulatedRun":
        self.at(at, lambda: self.attempts.complete.update(("trainer", "orchestrator")))
        return self.ends("trainer", 0, at=at).ends("orchestrator", 0, at=at)

    def is_signalled(self, number: signal.Signals, *, at: float) -> "SimulatedRun":
        return self.at(at, lambda: os.kill(os.getpid(), number))

    def newest(self, name: str) -> FakeChild:
        return self.host.newest(name)

    def starts(self) -> list[str]:
        return [child.spec.name for child in self.host.started]

    def status(self) -> RunStatus:
        return msgspec.json.decode(self.layout.status.read_bytes(), type=RunStatus)

    @property
    def text(self) -> str:
        return self.written.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SimulatedRun]:
    """Run with a launcher that heeds signals, whatever started the tests: a shell's background job ignores SIGINT."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield SimulatedRun(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_run_is_done_when_trainer_and_orchestrator_are(run: SimulatedRun) -> None:
    run.completes(at=30)
    assert run.supervisor.run() == 0
    assert run.starts() == ["inference", "trainer", "orchestrator"]
    assert run.newest("inference").signals == [signal.SIGTERM]
    assert run.host.spared == [()]
    status = run.status()
    assert (status.state, status.exit_code, status.restarts) == (RunState.DONE, 0, [])
    assert 30 <= run.clock.now() - 100.0 < 31


@pytest.mark.parametrize(
    ("error", "exit_code", "has_status"), [(NodesMissing("no lease"), 75, True), (RunDirectoryBusy("another leads"), 2, False)]
)
def test_a_launcher_that_must_not_lead_ends_its_roles_before_it_writes_anything(
    run: SimulatedRun, monkeypatch: pytest.MonkeyPatch, error: TrivetError, exit_code: int, has_status: bool
) -> None:
    """The log and the status may be in a directory that does not answer."""
    logs: list[str] = []

    def refuse() -> None:
        raise error

    def stop(*args: object, **kwargs: object) -> object:
        logs.append(run.text)
        return FakeHost.stop(run.host, *args, **kwargs)  # type: ignore[arg-type]  # as it was called

    run.at(10, lambda: monkeypatch.setattr(run.host, "lost_nodes", refuse))
    monkeypatch.setattr(run.host, "stop", stop)
    assert run.supervisor.run() == exit_code
    assert logs
    assert str(error) not in logs[0]
    assert str(error) in run.text
    assert (run.status().exit_code == exit_code) == has_status


NOBODY = "http://127.0.0.1:1/v1"
"""The address of a server that never answers."""


def start_times(run: SimulatedRun) -> dict[str, float]:
    """Return the seconds after which each role was started, to the supervisor's half second."""
    return {child.spec.name: round(at - 100.0) for child, at in zip(run.host.started, run.host.started_at, strict=True)}


@pytest.mark.parametrize("urls", [[], [NOBODY]])
def test_a_trainer_on_the_gpu_of_a_server_starts_when_that_answers(tmp_path: Path, urls: list[str]) -> None:
    run = SimulatedRun(tmp_path, urls=urls)
    run.attempts.starts_after = {"trainer": ("inference",)}
    run.is_signalled(signal.SIGINT, at=5)
    assert run.supervisor.run() == 130
    assert start_times(run) == {"inference": 0, "orchestrator": 0, "trainer": 5 if urls else 0}


def test_a_role_that_ends_while_others_wait_is_recovered_like_any_other(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, urls=[NOBODY])
    run.attempts.starts_after = {"trainer": ("inference",)}
    run.ends("inference", 1, at=3)
    assert run.supervisor.run() == 1
    assert run.starts() == ["inference", "orchestrator", "trainer"]
    assert "before it answered" in run.text


def test_a_killed_trainer_takes_the_orchestrator_along_and_both_start_again(run: SimulatedRun) -> None:
    run.at(5, lambda: write_report(run.layout, "trainer", step=8))
    run.at(9, lambda: setattr(run.attempts, "last_commit", Step(6)))
    run.attempts.max_steps = 20
    run.ends("trainer", -9, at=10).completes(at=60)
    assert run.supervisor.run() == 0
    assert run.starts() == ["inference", "trainer", "orchestrator", "trainer", "orchestrator"]
    assert run.host.started[2].signals == [signal.SIGTERM]
    assert list(run.host.spared[0]) == [run.newest("inference")]
    (restart,) = run.status().restarts
    assert (restart.from_step, restart.lost_steps) == (6, 2)
    assert [type(event) for event in run.attempts.events] == [Restart]
    assert "attempt 2 from step 6" in run.text
    assert "restarts: 1, " in run.text


def test_an_attempt_on_fewer_nodes_forgets_the_ranks_that_were_lost(run: SimulatedRun) -> None:
    run.attempts.names = ("inference", "trainer", "trainer-1", "orchestrator")
    run.at(5, lambda: write_report(run.layout, "trainer", step=8))
    run.at(11, lambda: setattr(run.attempts, "names", ("inference", "trainer", "orchestrator")))
    run.ends("trainer-1", NODE_LOST, at=10).completes(at=60)
    assert run.supervisor.run() == 0
    assert run.starts()[4:] == ["trainer", "orchestrator"]
    assert "trainer-1 lost with its node" in run.text
    assert {role.name for role in run.status().roles} == {"inference", "trainer", "orchestrator"}


def test_a_server_on_another_node_is_planned_again_before_it_is_started(run: SimulatedRun) -> None:
    run.ends("inference", NODE_LOST, at=10).completes(at=60)
    assert run.supervisor.run() == 0
    assert run.attempts.num_plans == 1
    assert run.attempts.named_without == [{"inference"}, set()]  # as it failed, and as it starts


def test_a_server_that_is_started_again_stays_named_when_something_else_fails(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, urls=[NOBODY])
    run.ends("inference", NODE_LOST, at=40).ends("trainer", -9, at=60).completes(at=120)
    assert run.supervisor.run() == 0
    assert run.starts().count("inference") == 2
    assert run.attempts.named_without == [{"inference"}, set(), {"training"}, set()]


def test_inference_is_started_again_alone(run: SimulatedRun) -> None:
    run.ends("inference", -9, at=10).completes(at=60)
    assert run.supervisor.run() == 0
    assert run.starts() == ["inference", "trainer", "orchestrator", "inference"]
    assert run.attempts.run.attempt == 1
    (restart,) = run.status().restarts
    assert (restart.roles, restart.from_step) == (["inference"], None)
    assert restart.down_s == pytest.approx(4, abs=1.5)


def test_a_server_is_started_again_once_the_trainer_on_its_gpu_waits_for_rollouts(run: SimulatedRun) -> None:
    run.attempts.starts_after = {"trainer": ("inference",)}
    run.ends("inference", -9, at=10).completes(at=60)
    run.at(40, lambda: write_report(run.layout, "trainer", waits_for="orchestrator"))
    assert run.supervisor.run() == 0
    *_, last = run.host.started_at
    assert run.starts()[-1] == "inference"
    assert 40 <= last - 100.0 <= 60


def test_a_final_failure_ends_the_run_and_quotes_the_log(run: SimulatedRun) -> None:
    run.layout.log_file("trainer.stdout").write_text("loss is nan\n")
    assert run.ends("trainer", 3, at=10).supervisor.run() == 3
    assert "trainer failed: ended with exit code 3" in run.text
    assert "  | loss is nan" in run.text
    assert run.status().state is RunState.FAILED
    assert all(child.exit_code is not None for child in run.host.started)


def test_on_sigterm_the_orchestrator_is_asked_to_commit(run: SimulatedRun) -> None:
    states: list[str] = []
    run.is_signalled(signal.SIGTERM, at=10)
    run.at(13, lambda: states.append(run.status().state))
    run.ends("orchestrator", 0, at=15).ends("trainer", 0, at=16)
    assert run.supervisor.run() == 143
    assert run.host.started[2].signals == [signal.SIGUSR1]
    assert states == [RunState.PREEMPTED]
    assert run.status().state is RunState.INTERRUPTED


def test_sigint_stops_at_once(run: SimulatedRun) -> None:
    assert run.is_signalled(signal.SIGINT, at=10).supervisor.run() == 130
    assert [child.signals for child in run.host.started] == [[signal.SIGTERM]] * 3


def test_what_does_not_heed_sigterm_is_killed_and_named(run: SimulatedRun) -> None:
    run.at(5, lambda: setattr(run.newest("inference"), "does_heed_sigterm", False)).completes(at=10)
    assert run.supervisor.run() == 0
    assert run.newest("inference").signals == [signal.SIGTERM, signal.SIGKILL]
    assert "inference did not end within 20 s of SIGTERM and was killed" in run.text


def test_without_a_whole_checkpoint_there_is_no_restart(run: SimulatedRun) -> None:
    run.attempts.error = CheckpointError("none is whole")
    assert run.ends("trainer", -9, at=10).supervisor.run() == 1
    assert "no restart is possible: none is whole" in run.text
    assert run.newest("inference").exit_code == -signal.SIGTERM


def test_an_error_of_our_own_leaves_no_process_behind(run: SimulatedRun) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run.at(10, fail).supervisor.run()
    assert all(child.exit_code is not None for child in run.host.started)


def test_a_role_that_stops_reporting_is_named_killed_and_started_again(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, watchdog_timeout_s=30)
    run.at(5, lambda: write_report(run.layout, "trainer", pid=77, step=1))
    run.completes(at=120)
    assert run.supervisor.run() == 0
    assert run.host.started[1].signals == [signal.SIGKILL]
    assert run.host.started[1].shown == [77]
    assert "trainer stuck: " in run.text
    assert "has not reported for 30 s" in run.status().restarts[0].cause


def test_lines_for_people_go_to_the_terminal(run: SimulatedRun) -> None:
    def write() -> None:
        run.layout.log_file("trainer.stdout").write_text("12:00:00 trainer SUCCESS Step 1\n12:00:00 trainer INFO loaded\n")

    run.at(5, write).completes(at=10)
    assert run.supervisor.run() == 0
    assert "SUCCESS Step 1" in run.text
    assert "INFO loaded" not in run.text


def test_a_checkpoint_to_go_on_from_is_named_at_the_end(run: SimulatedRun) -> None:
    run.attempts.last_commit = Step(2)
    assert run.ends("orchestrator", 2, at=10).supervisor.run() == 2
    assert "committed up to step 2; go on from there with --ckpt.resume-step -1" in run.text
