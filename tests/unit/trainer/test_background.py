import threading
import time
from collections.abc import Iterator

import pytest

from trivet.trainer.background import BackgroundWriter


@pytest.fixture
def background() -> Iterator[BackgroundWriter]:
    background = BackgroundWriter("test")
    yield background
    background.close()


def test_work_goes_on_after_its_start_and_the_next_waits_for_it(background: BackgroundWriter) -> None:
    done, may_end = list[str](), threading.Event()

    def first() -> None:
        assert may_end.wait(30)
        done.append("first")

    background.start(first)
    running = background.running
    assert running is not None
    assert not running.done()
    background.raise_failure()  # nothing to tell yet, and it does not wait
    threading.Timer(0.1, may_end.set).start()
    background.start(lambda: done.append("second"))
    assert done[0] == "first"
    background.wait()
    assert done == ["first", "second"]
    assert background.running is None


def test_a_failure_is_told_once_to_the_loop_and_to_whoever_waits_for_the_work(background: BackgroundWriter) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    background.start(fail)
    running = background.running
    assert running is not None
    with pytest.raises(OSError, match="the disk is gone"):
        running.result(30)
    with pytest.raises(OSError, match="the disk is gone"):
        background.raise_failure()
    background.wait()
    assert background.take_times() is None


def test_what_is_not_asynchronous_is_over_when_it_was_started() -> None:
    done, at_once = list[str](), BackgroundWriter("test", is_async=False)
    at_once.start(lambda: done.append("done"))
    assert done == ["done"]
    at_once.close()


def test_times_are_those_of_the_newest_work_and_given_once(background: BackgroundWriter) -> None:
    background.start(lambda: time.sleep(0.2))
    background.wait()
    times = background.take_times()
    assert times is not None
    seconds, cpu_s = times
    assert cpu_s < 0.2 <= seconds  # asleep is no work of a core
    assert background.take_times() is None


def test_what_nobody_asked_for_is_logged_at_the_end(background: BackgroundWriter, caplog: pytest.LogCaptureFixture) -> None:
    background.start(lambda: 1 // 0)
    background.close()
    background.close()
    assert caplog.text.count("failed: ZeroDivisionError") == 1
