"""What this process is doing, for the watchdog and `trivet status`.

Like logging: an entry point starts the reports once, and whoever does something says so; without a report nothing is written.
A report is written each second, and at once when a step is finished, by a thread of its own: a long step, a model that loads or
a blocked event loop does not silence it. What does is a process that was stopped or hangs as a whole.

>>> start_reports(layout, role="trainer", attempt=1)
>>> with waiting("batch 12", on="orchestrator"):
...     batch = receiver.receive(12)
>>> doing("training step 12")
>>> note(step=12)
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from trivet.config.layout import RunLayout
from trivet.durable import DECODE_ERRORS, open_regular, replace_file
from trivet.stacks import show_stacks_on_signal
from trivet.wire.status import ProcessReport, WorkerStatus

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


class ProcessProgress:
    """The state that the module's functions change; one per process.

    >>> progress = ProcessProgress(clock=time.time)
    >>> progress.begin("loading the model")
    >>> progress.report(role="trainer").activity
    'loading the model'
    """

    def __init__(self, *, clock: Callable[[], float] = lambda: time.time()) -> None:
        self.has_news = threading.Event()
        """A step was finished: worth a report at once."""
        self._clock = clock
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {"activity": "starting", "waits_for": "", "since": clock()}
        self._workers: Callable[[], Sequence[WorkerStatus]] | None = None
        self._numbers: Callable[[], Mapping[str, int]] | None = None

    def begin(self, activity: str, *, waits_for: str = "") -> None:
        with self._lock:
            self._fields |= {"activity": activity, "waits_for": waits_for, "since": self._clock()}

    @contextmanager
    def waiting(self, activity: str, *, waits_for: str) -> Iterator[None]:
        """Within it the process waits; afterwards it does what it did before, unless it has begun something else."""
        before = self._now()
        self.begin(activity, waits_for=waits_for)
        mine = self._now()
        try:
            yield
        finally:
            if self._now() == mine:
                with self._lock:
                    self._fields |= before

    def _now(self) -> dict[str, Any]:
        with self._lock:
            return {name: self._fields[name] for name in ("activity", "waits_for", "since")}

    def note(self, **fields: int) -> None:
        with self._lock:
            self._fields |= fields
        if "step" in fields:
            self.has_news.set()

    def ask_workers(self, source: Callable[[], Sequence[WorkerStatus]] | None) -> None:
        self._workers = source

    def ask_numbers(self, source: Callable[[], Mapping[str, int]] | None) -> None:
        self._numbers = source

    def report(self, *, role: str, rank: int = 0, num_ranks: int = 1, attempt: int = 1) -> ProcessReport:
        workers = list(self._workers()) if self._workers is not None else []
        if self._numbers is not None:
            self.note(**self._numbers())
        with self._lock:
            return ProcessReport(
                role=role,
                rank=rank,
                num_ranks=num_ranks,
                pid=os.getpid(),
                attempt=attempt,
                time=self._clock(),
                workers=workers,
                **self._fields,
            )


_progress = ProcessProgress()


def doing(activity: str) -> None:
    """From now on this process does `activity`: "training step 12"."""
    _progress.begin(activity)


def wait_for(what: str, *, on: str) -> None:
    """From now on this process waits for `what` ("policy 7") from the role `on`."""
    _progress.begin(what, waits_for=on)


@contextmanager
def waiting(what: str, *, on: str) -> Iterator[None]:
    """Within it this process waits for `what` ("batch 12") from the role `on`."""
    with _progress.waiting(what, waits_for=on):
        yield


def note(**fields: int) -> None:
    """Numbers of a report: step, policy_version, num_ready, num_in_flight."""
    _progress.note(**fields)


def ask_workers(source: Callable[[], Sequence[WorkerStatus]] | None) -> None:
    """Have each report carry what `source` says; it is called from the reports' thread. None ends it."""
    _progress.ask_workers(source)


def ask_numbers(source: Callable[[], Mapping[str, int]] | None) -> None:
    """Have each report carry the numbers that `source` says, as `note` takes them; called from the reports' thread."""
    _progress.ask_numbers(source)


def start_reports(layout: RunLayout, *, role: str, attempt: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Write this process's report now, and from then on every second until it ends. Who reports can be asked for its stacks."""
    show_stacks_on_signal()
    path = layout.report_file(role, rank)

    def write() -> None:
        report = _progress.report(role=role, rank=rank, num_ranks=num_ranks, attempt=attempt)
        replace_file(path, msgspec.json.encode(report) + b"\n")

    def write_for_ever() -> None:
        has_failed = False
        while True:
            _progress.has_news.wait(INTERVAL_S)
            _progress.has_news.clear()
            try:
                write()
                has_failed = False
            except OSError as exc:
                if not has_failed:
                    logger.warning("%s cannot be written: %s; the run goes on, its status is old", path, exc)
                has_failed = True
                _touch(path)

    write()
    threading.Thread(target=write_for_ever, name="progress-reports", daemon=True).start()


def read_report(path: Path) -> ProcessReport | None:
    """What a process said last; None before it said anything.

    Raises:
        msgspec.DecodeError: the file is no report of this version.
    """
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(), type=ProcessReport)
    except FileNotFoundError:
        return None
    except DECODE_ERRORS as exc:
        raise msgspec.DecodeError(str(exc)) from exc


def _touch(path: Path) -> None:
    """A sign of life that needs no room on the disk: the watchdog looks for any change of the file."""
    try:
        os.utime(path)
    except OSError as exc:
        logger.debug("%s cannot be touched: %s", path, exc)
