"""The agent of a node that is not the first: starts, signals and watches the processes that the head of the run tells it to.

It decides nothing. When it misses the head it ends its processes, before the head starts others in their place, and soon after that
itself. Its processes end with it, however it ends.
"""

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from trivet.cluster.report_reader import ReportReader
from trivet.errors import ConfigError
from trivet.launcher.logs import RunLog
from trivet.launcher.nodes.messages import (
    Beat,
    EndOrphans,
    EndRun,
    HoldPorts,
    Order,
    Orders,
    RemoteState,
    ShowStacks,
    SignalProcess,
    StartProcess,
)
from trivet.launcher.processes import Child, LocalHost
from trivet.launcher.run_directory import Scratch
from trivet.process.sockets import ReservedPorts

_START_FAILED = 127
"""Exit code of a process that could not be started, as a shell has it."""


@dataclass(slots=True, kw_only=True)
class _Started:
    order: StartProcess
    child: Child | None
    """None when it could not be started."""


class NodeAgent:
    """The processes and ports of one node.

    >>> agent = NodeAgent(1, host=host, bind="10.0.0.2", ports=ports, scratch=scratch, open_log=open_log)
    >>> agent.carry_out(orders)
    >>> beat = agent.beat()
    """

    def __init__(
        self,
        index: int,
        *,
        host: LocalHost,
        bind: str,
        ports: ReservedPorts,
        scratch: Scratch,
        open_log: Callable[[], RunLog],
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """Begin with no process.

        Args:
            open_log: opens the log of this node, for the first process: before, the head may still empty the directory.
        """
        self.exit_code: int | None = None
        """The exit code of the run, once the head has told it."""
        self.is_leaving = False
        """Whether a signal has asked this node to end."""
        self._index = index
        self._host = host
        self._bind = bind
        self._reserved = ports
        self._scratch = scratch
        self._open_log = open_log
        self._log: RunLog | None = None
        self._unix_time = unix_time
        self._num_done = 0
        self._num_beats = 0
        self._ports: dict[str, int] = {}
        self._port_error = ""
        self._started: dict[int, _Started] = {}
        self._reader = ReportReader(host.read_reports)

    @property
    def exits(self) -> tuple[int | None, ...]:
        """Exit codes of the processes: when they change, the head wants to know at once."""
        return tuple(_exit_code(started) for started in self._started.values())

    def carry_out(self, orders: Orders) -> None:
        """Carry out the orders that are new."""
        for number, order in enumerate(orders.orders, start=orders.first):
            if number == self._num_done + 1:
                self._carry_out(number, order)
                self._num_done = number

    def _carry_out(self, number: int, order: Order) -> None:
        match order:
            case HoldPorts():
                self._hold(order)
            case StartProcess():
                self._start(number, order)
            case SignalProcess():
                self._signal(order)
            case EndOrphans():
                children = (self._started[each].child for each in order.spared if each in self._started)
                self._host.end_orphans(spared=[child for child in children if child is not None])
            case ShowStacks():
                started = self._started.get(order.process)
                if started is not None and started.child is not None:
                    self._host.show_stacks(started.child, order.pids)
            case EndRun():
                self.end_processes(timeout_s=0.0)
                self.exit_code = order.exit_code
                self.say(f"the run is over with exit code {order.exit_code}")

    def _hold(self, order: HoldPorts) -> None:
        self._port_error = ""
        try:
            for name in order.names:
                if name not in self._ports:
                    self._ports[name] = self._reserved.reserve(self._bind, preferred=order.preferred.get(name, 0))
        except ConfigError as exc:
            self._port_error = str(exc)

    def _start(self, number: int, order: StartProcess) -> None:
        self._log = self._log or self._open_log()
        spec = self._scratch.redirect(order.spec(self._index))
        for old, started in list(self._started.items()):
            if started.order.name == order.name:
                if started.child is not None:
                    started.child.signal_group(signal.SIGKILL)  # mostly it has ended
                self._reader.forget(old)
                del self._started[old]
        try:
            child = self._host.start(spec)
        except OSError as exc:
            self.say(f"{order.name} cannot be started: {exc}")
            child = None
        else:
            self.say(f"started {order.name} pid={child.pid} log={spec.log}")
            self._reader.follow(number, child)
        self._started[number] = _Started(order=order, child=child)

    def _signal(self, order: SignalProcess) -> None:
        started = self._started.get(order.process)
        if started is None or started.child is None:
            return
        number = signal.Signals(order.signal)
        if order.does_reach_group:
            started.child.signal_group(number)
        else:
            started.child.signal_leader(number)

    def beat(self) -> Beat:
        """Return how this node stands now."""
        self._num_beats += 1
        alive = [started.child for started in self._started.values() if started.child is not None]
        stopped = dict(zip(map(id, alive), self._host.find_stopped(alive), strict=True))
        states: list[RemoteState] = []
        for number, started in self._started.items():
            if started.child is None:
                states.append(RemoteState(order=number, pid=0, exit_code=_START_FAILED))
                continue
            child, reports = started.child, self._reader.newest(number)
            states.append(
                RemoteState(
                    order=number,
                    pid=child.pid,
                    exit_code=child.exit_code,
                    stopped=stopped[id(child)],
                    reports=reports.readable,
                    stamps=dict(reports.stamps),
                )
            )
        return Beat(
            number=self._num_beats,
            time=self._unix_time(),
            num_done=self._num_done,
            ports=dict(self._ports),
            port_error=self._port_error,
            is_leaving=self.is_leaving,
            processes=states,
        )

    def end_processes(self, *, timeout_s: float) -> None:
        """End every process of this node: SIGTERM, then after `timeout_s` SIGKILL."""
        children = [started.child for started in self._started.values() if started.child is not None]
        self._host.stop(children, timeout_s=timeout_s)
        self._host.end_orphans()

    def say(self, message: str) -> None:
        """Write a line into the log of this node; on the terminal alone before the first process."""
        if self._log is not None:
            self._log.say(message)
        else:
            print(f"node {self._index}: {message}", file=sys.stderr)

    def close(self) -> None:
        """End what reads reports; the processes have ended."""
        self._reader.close()

    def forget(self) -> None:
        """Begin anew, as an agent that has carried out nothing. Ports stay held."""
        for number in self._started:
            self._reader.forget(number)
        self._started.clear()
        self._num_done = self._num_beats = 0


def _exit_code(started: _Started) -> int | None:
    return started.child.exit_code if started.child is not None else _START_FAILED
