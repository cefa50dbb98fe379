from trivet.launcher.supervision.health import FIRST_REPORT_S, ReportStamp, Watchdog

TIMEOUT_S = 60.0


class History:
    """A role, whose reports change or not, checked every second of a fake clock."""

    def __init__(self) -> None:
        self.watchdog = Watchdog(timeout_s=TIMEOUT_S)
        self.watchdog.begin("trainer", now=0.0)
        self.now = 0.0
        self.stamps: dict[str, ReportStamp] = {"trainer": None}
        self.stopped: tuple[int, ...] = ()

    def reports(self, name: str = "trainer") -> "History":
        self.stamps[name] = (1, int(self.now * 1e9) + 1)
        return self

    def passes(self, seconds: float, *, step: float = 1.0) -> str:
        """Return the last finding."""
        end = self.now + seconds
        said = ""
        while self.now < end:
            self.now += step
            self.watchdog.notice_time(self.now)
            said = self.watchdog.check("trainer", stamps=self.stamps, stopped=self.stopped, now=self.now)
        return said


def test_a_role_that_reports_is_not_stuck_however_long_it_waits() -> None:
    history = History()
    for _ in range(100):
        assert history.reports().passes(30) == ""


def test_a_role_that_stops_reporting_is_stuck_after_the_timeout() -> None:
    history = History()
    history.reports().passes(1)
    assert history.passes(TIMEOUT_S) == ""
    assert history.passes(1) == "trainer has not reported for 61 s"


def test_a_role_that_reports_again_is_no_longer_stuck() -> None:
    history = History()
    history.reports().passes(TIMEOUT_S + 5)
    assert history.reports().passes(1) == ""


def test_one_silent_rank_of_several_is_named() -> None:
    history = History()
    history.stamps = {}
    history.reports("trainer rank 0 of 2").reports("trainer rank 1 of 2").passes(1)
    said = ""
    for _ in range(7):
        said = history.reports("trainer rank 0 of 2").passes(10)
    assert said == "trainer rank 1 of 2 has not reported for 70 s"


def test_a_role_that_has_not_reported_yet_has_longer() -> None:
    history = History()
    assert history.passes(FIRST_REPORT_S) == ""
    assert history.passes(1) == "trainer has not reported since its start 301 s ago"


def test_a_stopped_process_is_named_although_the_role_reports() -> None:
    history = History()
    history.stopped = (4711,)
    for _ in range(6):
        assert history.reports().passes(10) == ""
    history.reports()
    assert history.passes(2) == "pid 4711 stopped by a signal 61 s ago"


def test_a_process_that_goes_on_before_the_timeout_is_forgotten() -> None:
    history = History()
    history.stopped = (4711,)
    history.reports().passes(50)
    history.stopped = ()
    history.reports().passes(1)
    history.stopped = (4711,)
    assert history.reports().passes(50) == ""


def test_time_in_which_the_launcher_itself_was_stopped_counts_for_nobody() -> None:
    history = History()
    history.reports().passes(10)
    assert history.passes(3600, step=3600) == ""
    assert history.passes(TIMEOUT_S - 11) == ""
    assert history.passes(3) != ""


def test_a_restarted_role_begins_anew() -> None:
    history = History()
    history.reports().passes(TIMEOUT_S + 5)
    history.watchdog.begin("trainer", now=history.now)
    history.stamps["trainer"] = None
    assert history.passes(100) == ""
