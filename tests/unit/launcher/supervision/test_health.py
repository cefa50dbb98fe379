from pathlib import Path

from support.fake_roles import FakeChild, FakeClock, FakeHost, make_log, make_spec, write_report
from trivet.config.layout import RunLayout
from trivet.config.schema.deployment import RecoveryConfig
from trivet.launcher.supervision.health import RoleHealthMonitor
from trivet.launcher.supervision.restarts import RestartLog
from trivet.launcher.supervision.role_processes import RoleProcess


class Watched:
    """A trainer that reports at the given seconds, checked every second."""

    def __init__(self, tmp_path: Path, **recovery: object) -> None:
        self.layout = RunLayout(tmp_path)
        self.layout.logs.mkdir()
        self.clock, self.host = FakeClock(), FakeHost()
        log, self.written = make_log(tmp_path)
        self.restarts = RestartLog(log=log, clock=self.clock)
        self.monitor = RoleHealthMonitor(
            RecoveryConfig.model_validate(recovery),
            layout=self.layout,
            host=self.host,
            restarts=self.restarts,
            log=log,
            clock=self.clock,
        )
        self.role = RoleProcess(FakeChild(spec=make_spec(self.layout, "trainer"), pid=7), now=self.clock.now())
        self.monitor.begin("trainer")

    def passes(self, seconds: int, *, does_report: bool) -> "Watched":
        for _ in range(seconds):
            if does_report:
                write_report(self.layout, "trainer", pid=7, time=self.clock.now())
            self.monitor.check([self.role])
            self.clock.sleep(1)
        return self


def test_reports_are_read_once_a_second_and_at_once_when_that_is_asked_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.monitor.check([watched.role])
    assert not watched.monitor.check([watched.role])
    watched.monitor.check_at_once()
    assert watched.monitor.check([watched.role])


def test_a_role_that_stops_reporting_is_named_once_with_its_stacks(tmp_path: Path) -> None:
    watched = Watched(tmp_path, watchdog_timeout_s=20).passes(5, does_report=True).passes(40, does_report=False)
    assert watched.role.stuck
    assert watched.host.shown == [7]
    assert watched.written.getvalue().count("WARNING trainer stuck: ") == 1
    assert 'recovery.on_stuck = "restart"' in watched.written.getvalue()
    assert watched.restarts.last_error.startswith("trainer stuck: trainer has not reported for ")


def test_a_role_that_reports_again_is_said_to(tmp_path: Path) -> None:
    watched = Watched(tmp_path, watchdog_timeout_s=20).passes(5, does_report=True).passes(40, does_report=False)
    watched.passes(2, does_report=True)
    assert not watched.role.stuck
    assert "trainer reports again" in watched.written.getvalue()


def test_a_process_that_a_signal_stopped_is_found_among_those_of_the_machine(tmp_path: Path) -> None:
    watched = Watched(tmp_path, watchdog_timeout_s=20)
    watched.host.stopped.add(7)
    watched.passes(40, does_report=True)
    assert "pid 7 stopped by a signal" in watched.role.stuck


def test_a_run_in_which_nothing_moves_is_said_and_shows_its_stacks_the_first_time(tmp_path: Path) -> None:
    watched = Watched(tmp_path, stall_warn_s=30).passes(100, does_report=True)
    assert watched.host.shown == [7]
    assert watched.written.getvalue().count("WARNING nothing has moved for ") == 2
    assert not watched.role.stuck
