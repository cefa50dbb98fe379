"""Reads the reports of a node's processes beside its agent: a shared directory that does not answer must not silence the node."""

import threading
from collections.abc import Callable
from contextlib import suppress

from trivet.launcher.processes import Child, RoleReports

_INTERVAL_S = 0.25


class ReportReader:
    """The newest reports of some processes, by the numbers of the orders that started them. A thread reads them.

    >>> reader = ReportReader(host.read_reports)
    >>> reader.follow(3, child)
    >>> reports = reader.newest(3)
    >>> reader.close()
    """

    def __init__(self, read: Callable[[Child], RoleReports]) -> None:
        self._read = read
        self._children: dict[int, Child] = {}
        self._newest: dict[int, tuple[Child, RoleReports]] = {}
        """The reports that were read last, and of which child: numbers of orders begin again for another head."""
        self._error: Exception | None = None
        self._is_closing = threading.Event()
        # A thread that hangs with the directory must not keep the agent from ending.
        self._thread = threading.Thread(target=self._run, name="report-reader", daemon=True)
        self._thread.start()

    def follow(self, order: int, child: Child) -> None:
        """Read the reports of a process from now on."""
        self._children[order] = child

    def forget(self, order: int) -> None:
        """Stop reading the reports of a process."""
        self._children.pop(order, None)
        self._newest.pop(order, None)

    def newest(self, order: int) -> RoleReports:
        """Return what a process reported last; nothing before the first look.

        Raises:
            Exception: what ended the thread.
        """
        if self._error is not None:
            raise self._error
        child, reports = self._newest.get(order, (None, RoleReports()))
        return reports if child is self._children.get(order) else RoleReports()

    def close(self) -> None:
        """Have the thread end, without waiting for it."""
        self._is_closing.set()

    def _run(self) -> None:
        try:
            self._keep_reading()
        except Exception as exc:  # noqa: BLE001  # `newest` raises it: without reports every process would look stuck
            self._error = exc

    def _keep_reading(self) -> None:
        while not self._is_closing.wait(_INTERVAL_S):
            for order, child in list(self._children.items()):
                with suppress(OSError):  # the directory cannot be read now: there is nothing new
                    self._newest[order] = child, self._read(child)
