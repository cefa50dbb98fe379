"""A thread reads the reports of a node's processes; a directory that hangs or fails hides nothing else."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.processes import wait_until
from trivet.cluster.report_reader import ReportReader
from trivet.launcher.processes import Child, RoleReports

NEVER, FIRST = RoleReports(), RoleReports(stamps={"trainer": (1, 2)})


def make_child(name: str) -> Child:
    return cast("Child", SimpleNamespace(name=name))


class Directory:
    """Answers with what it was given, raises it, or hangs until it is let go."""

    def __init__(self) -> None:
        self.answers: dict[str, RoleReports | OSError] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()

    def read(self, child: Any) -> RoleReports:
        assert self.may_answer.wait(60)
        answer = self.answers[child.name]
        if isinstance(answer, OSError):
            raise answer
        return answer


@pytest.fixture
def directory() -> Iterator[Directory]:
    directory = Directory()
    yield directory
    directory.may_answer.set()


@pytest.fixture
def reader(directory: Directory) -> ReportReader:
    return ReportReader(directory.read)


def await_newest(reader: ReportReader, number: int, expected: RoleReports) -> None:
    wait_until(lambda: reader.newest(number) == expected, timeout_s=20, waiting_for=f"the reports of {number}")


def test_reports_are_read_again_and_again_until_they_are_forgotten(directory: Directory, reader: ReportReader) -> None:
    directory.answers["one"] = FIRST
    reader.follow(1, make_child("one"))
    await_newest(reader, 1, FIRST)
    directory.answers["one"] = RoleReports(stamps={"trainer": (1, 3)})
    await_newest(reader, 1, RoleReports(stamps={"trainer": (1, 3)}))
    reader.forget(1)
    await_newest(reader, 1, NEVER)


def test_a_report_that_cannot_be_read_leaves_the_one_before_and_the_others(directory: Directory, reader: ReportReader) -> None:
    directory.answers |= {"one": FIRST, "two": FIRST}
    reader.follow(1, make_child("one"))
    await_newest(reader, 1, FIRST)
    directory.answers["one"] = OSError("stale file handle")
    reader.follow(2, make_child("two"))
    await_newest(reader, 2, FIRST)
    assert reader.newest(1) == FIRST


def test_a_directory_that_hangs_is_not_waited_for(directory: Directory, reader: ReportReader, tmp_path: Path) -> None:
    directory.may_answer.clear()
    directory.answers["one"] = FIRST
    reader.follow(1, make_child("one"))
    assert reader.newest(1) == NEVER
    directory.may_answer.set()
