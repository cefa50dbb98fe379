"""Writes the report of a process's activity once a second, for the watchdog and `trivet status`.

It works like logging: an entry point calls `start_reports` once, and any module calls `begin` for a new activity. Without
`start_reports` no report is written. A thread writes the report every second, and at once when a step is finished or a wait begins.
So the process reports also during a long step, while a model loads, or while its event loop is blocked. A process that is stopped
by a signal, or hangs as a whole, does not report.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from trivet.config.layout import RunLayout
from trivet.process.signals import show_stacks_on_signal
from trivet.storage.durable import DECODE_ERRORS, open_regular, replace_file
from trivet.wire.status import ProcessReport, WorkerStatus

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
"""The longest time between two reports, in seconds. `trivet status` calls a report old after fifteen of these intervals."""


class ProcessReporter:
    """Holds the content of this process's report. There is one per process, and its methods are the functions of this module."""

    def __init__(self, *, clock: Callable[[], float] = lambda: time.time()) -> None:
        self.has_news = threading.Event()
        """Set when a step was finished or a wait began: the next report is written at once."""
        self._clock = clock
        self._lock = threading.Lock()
        self._activity: dict[str, Any] = {}
        """The report's fields `activity`, `waits_for` and `since`."""
        self._numbers: dict[str, int] = {}
        """Further fields of the report, such as `step`."""
        self._read_workers: Callable[[], Sequence[WorkerStatus]] | None = None
        self._read_numbers: Callable[[], Mapping[str, int]] | None = None
        self.begin("starting")

    def begin(self, activity: str, *, waits_for: str = "") -> None:
        """Report an activity ("training step 12").

        Args:
            waits_for: the role for which the process waits; empty while it works.
        """
        self._activity = {"activity": activity, "waits_for": waits_for, "since": self._clock()}

    def begin_waiting(self, what: str, *, on: str) -> None:
        """Report at once that this process waits for `what` ("policy 7") from the role `on`."""
        self.begin(what, waits_for=on)
        self.has_news.set()

    @contextmanager
    def waiting(self, what: str, *, on: str) -> Generator[None, None, None]:
        """Report a wait for `what` ("batch 12") from the role `on` during the block.

        After it the earlier activity is reported again, unless another one has begun meanwhile.
        """
        before = self._activity
        self.begin(what, waits_for=on)
        this_wait = self._activity
        try:
            yield
        finally:
            if self._activity is this_wait:
                self._activity = before

    def set_numbers(self, **numbers: int) -> None:
        """Set fields of the report: step, policy_version, num_ready, num_in_flight. A step is reported at once."""
        with self._lock:
            self._numbers |= numbers
        if "step" in numbers:
            self.has_news.set()

    def set_worker_source(self, source: Callable[[], Sequence[WorkerStatus]] | None) -> None:
        """Add the workers that `source` returns to each report. The reporting thread calls it. None removes the source."""
        self._read_workers = source

    def set_number_source(self, source: Callable[[], Mapping[str, int]] | None) -> None:
        """Add the numbers that `source` returns to each report, by the names of `set_numbers`. None removes the source."""
        self._read_numbers = source

    def report(self, *, role: str, rank: int = 0, num_ranks: int = 1, attempt: int = 1) -> ProcessReport:
        """Return the report with the present state."""
        workers = list(self._read_workers()) if self._read_workers is not None else []
        if self._read_numbers is not None:
            self.set_numbers(**self._read_numbers())
        with self._lock:
            numbers: dict[str, Any] = dict(self._numbers)
        return ProcessReport(
            role=role,
            rank=rank,
            num_ranks=num_ranks,
            pid=os.getpid(),
            attempt=attempt,
            time=self._clock(),
            workers=workers,
            **self._activity,
            **numbers,
        )


_reporter = ProcessReporter()
begin, begin_waiting, waiting = _reporter.begin, _reporter.begin_waiting, _reporter.waiting
set_numbers, set_worker_source, set_number_source = (
    _reporter.set_numbers,
    _reporter.set_worker_source,
    _reporter.set_number_source,
)


def start_reports(layout: RunLayout, *, role: str, attempt: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Write this process's report now, and every second until the process ends. Also make STACKS_SIGNAL show its stacks."""
    show_stacks_on_signal()
    path = layout.report_file(role, rank)

    def write() -> None:
        report = _reporter.report(role=role, rank=rank, num_ranks=num_ranks, attempt=attempt)
        replace_file(path, msgspec.json.encode(report) + b"\n")

    def write_repeatedly() -> None:
        has_failed = False
        while True:
            _reporter.has_news.wait(REPORT_INTERVAL_S)
            _reporter.has_news.clear()
            try:
                write()
                has_failed = False
            except OSError as exc:
                if not has_failed:
                    logger.warning("%s cannot be written: %s; the run goes on, its status is old", path, exc)
                has_failed = True
                with suppress(OSError):  # needs no free disk space; the watchdog treats any change of the file as a report
                    os.utime(path)

    write()
    threading.Thread(target=write_repeatedly, name="process-reports", daemon=True).start()


def read_report(path: Path) -> ProcessReport | None:
    """Return the last report of a process; None before its first.

    Raises:
        msgspec.DecodeError: the file is not a report of this version.
    """
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(), type=ProcessReport)
    except FileNotFoundError:
        return None
    except DECODE_ERRORS as exc:
        raise msgspec.DecodeError(str(exc)) from exc
