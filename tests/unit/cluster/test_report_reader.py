"""A thread reads the reports of a node's processes; a directory that hangs or fails hides nothing else."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from support.processes import wait_until
from trivet.cluster.report_reader import ReportReader
from trivet.launcher.processes import Child, RoleReports

NEVER, FIRST, SECOND = RoleReports(), RoleReports(stamps={"trainer": (1, 2)}), RoleReports(stamps={"trainer": (1, 3)})


def make_child(read: Callable[[], RoleReports]) -> Child:
    return cast("Child", SimpleNamespace(read_reports=read))


def await_newest(reader: ReportReader, number: int, expected: RoleReports) -> None:
    wait_until(lambda: reader.newest(number) == expected, timeout_s=20, waiting_for=f"the reports of {number}")


def test_reports_are_read_until_they_are_forgotten_and_one_that_cannot_be_read_leaves_the_others() -> None:
    answers: dict[str, RoleReports | None] = {"one": FIRST, "two": FIRST}

    def read(name: str) -> RoleReports:
        if (answer := answers[name]) is None:
            raise OSError("stale file handle")
        return answer

    reader = ReportReader()
    reader.follow(1, make_child(lambda: read("one")))
    await_newest(reader, 1, FIRST)
    answers["one"] = SECOND
    await_newest(reader, 1, SECOND)
    answers["one"] = None
    reader.follow(2, make_child(lambda: read("two")))
    await_newest(reader, 2, FIRST)
    assert reader.newest(1) == SECOND
    reader.forget(1)
    await_newest(reader, 1, NEVER)


def test_a_directory_that_hangs_is_not_waited_for_and_any_other_error_is_passed_on() -> None:
    may_answer = threading.Event()

    def read() -> RoleReports:
        may_answer.wait(60)
        raise ValueError("no report")

    reader = ReportReader()
    reader.follow(1, make_child(read))
    assert reader.newest(1) == NEVER
    may_answer.set()
    with pytest.raises(ValueError, match="no report"):
        wait_until(lambda: reader.newest(1) != NEVER, timeout_s=20, waiting_for="the error")
