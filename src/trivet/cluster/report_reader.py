"""Reads the reports of a node's processes in a thread: a shared directory that does not answer must not silence the node."""

import threading
import time
from contextlib import suppress

from trivet.launcher.processes import Child, RoleReports

_INTERVAL_S = 0.25


class ReportReader:
    """The newest reports of some processes, by their numbers. A thread reads them.

    >>> reader = ReportReader()
    >>> reader.follow(3, child)
    >>> reports = reader.newest(3)
    """

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._newest: dict[int, RoleReports] = {}
        self._error: Exception | None = None
        # A thread that hangs with the directory must not keep the node from ending.
        threading.Thread(target=self._run, name="report-reader", daemon=True).start()

    def follow(self, number: int, child: Child) -> None:
        """Read the reports of a process from now on."""
        self._children[number] = child

    def forget(self, number: int) -> None:
        """Stop reading the reports of a process."""
        self._children.pop(number, None)
        self._newest.pop(number, None)

    def newest(self, number: int) -> RoleReports:
        """Return what a process reported last; nothing before the first look.

        Raises:
            Exception: what ended the thread.
        """
        if self._error is not None:
            raise self._error
        return self._newest.get(number, RoleReports())

    def _run(self) -> None:
        try:
            self._keep_reading()
        except Exception as exc:  # noqa: BLE001  # `newest` raises it: without reports every process would look stuck
            self._error = exc

    def _keep_reading(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            for number, child in list(self._children.items()):
                with suppress(OSError):  # the directory cannot be read now: there is nothing new
                    self._newest[number] = child.read_reports()
