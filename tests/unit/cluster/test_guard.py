"""A driver that has lost the cluster or its directory ends."""

import threading
import time

import pytest

from support.processes import wait_until
from trivet.cluster.guard import DriverGuard
from trivet.errors import NodesMissing, RunDirectoryBusy


def make_guard(reach: object, ended: list[int]) -> DriverGuard:
    assert callable(reach)
    return DriverGuard({"output_dir": reach}, lost_after_s=1.5, orderly_end_s=0.5, end_this_process=ended.append)


def raises(guard: DriverGuard) -> bool:
    try:
        guard.check()
    except (NodesMissing, RunDirectoryBusy):
        return True
    return False


@pytest.mark.parametrize("kind", ["error", "hang"])
def test_a_driver_ends_when_its_directory_does_not_answer(kind: str) -> None:
    ended, is_over = list[int](), threading.Event()

    def reach() -> None:
        if kind == "hang":
            is_over.wait()
        raise OSError

    with make_guard(reach, ended) as guard:
        guard.check()
        wait_until(lambda: raises(guard), timeout_s=20, waiting_for="the error")
        with pytest.raises(NodesMissing, match="output_dir did not answer"):
            guard.check()
        wait_until(
            lambda: ended == [75], timeout_s=20, waiting_for="the end of the process, which the main thread did not bring"
        )
    is_over.set()


def test_a_driver_in_whose_place_another_leads_ends_at_once() -> None:
    def reach() -> None:
        raise RunDirectoryBusy("another leads")

    with make_guard(reach, []) as guard:
        wait_until(lambda: raises(guard), timeout_s=20, waiting_for="the error")
        with pytest.raises(RunDirectoryBusy):
            guard.check()


def test_the_first_error_of_others_is_passed_on() -> None:
    with make_guard(lambda: None, []) as guard:
        guard.fail(ValueError("the first"))
        guard.fail(ValueError("the second"))
        with pytest.raises(ValueError, match="the first"):
            guard.check()


def test_nothing_happens_while_all_answers_and_after_the_end() -> None:
    ended = list[int]()
    with make_guard(lambda: None, ended) as guard:
        time.sleep(2.5)
        guard.check()
    time.sleep(2.5)
    assert ended == []
