"""Runs the processes of one node as the driver desires: starts, signals and watches them. It decides nothing.

The `cluster.actor` holds it in a Ray actor. One thread calls it: the kernel ends a process with the thread that started it, and not
with the process.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from trivet.cluster.messages import Desired, DesiredProcess, NodeFacts, Observed, ObservedProcess
from trivet.cluster.own_directory import OwnDirectory
from trivet.cluster.report_reader import ReportReader
from trivet.errors import ConfigError
from trivet.launcher.processes import SYSTEM_CLOCK, Child, Clock, LocalHost
from trivet.launcher.run_directory import Scratch
from trivet.process.sockets import ReservedPorts

_START_FAILED = 127
"""Exit code of a process that could not be started, as a shell has it."""


@dataclass(slots=True)
class _Started:
    name: str
    child: Child | None
    """None when it could not be started."""
    num_signals: int = 0
    """Signals of the desired process that were sent."""
    num_stacks: int = 0

    @property
    def exit_code(self) -> int | None:
        return self.child.exit_code if self.child is not None else _START_FAILED


class NodeProcesses:
    """The processes and ports of one node.

    >>> own = NodeProcesses(host=host, facts=facts, ports=ports, scratch=scratch, say=log.say)
    >>> own.apply(desired)
    >>> observed = own.observe()
    """

    def __init__(
        self,
        *,
        host: LocalHost,
        facts: NodeFacts,
        ports: ReservedPorts,
        scratch: Scratch,
        say: Callable[[str], None],
        own: OwnDirectory | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Begin with no process.

        Args:
            facts: those of this machine. The node's listeners are reached at its address.
            say: writes a line into the log of this node.
            own: what the node has instead of the output directory; None: it uses that.
        """
        self.is_leaving = False
        """Whether this node was asked to end."""
        self._host = host
        self._facts = facts
        self._reserved = ports
        self._scratch = scratch
        self._say = say
        self._own = own
        self._clock = clock
        self._session = 0
        self._num_applied = 0
        self._applied: Desired | None = None
        """The newest message, without its numbers."""
        self._num_sweeps = 0
        self._ports: dict[str, int] = {}
        self._port_error = ""
        self._started: dict[int, _Started] = {}
        self._reader = ReportReader()

    @property
    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit codes of the processes: when they change, the driver wants to know at once."""
        return tuple(started.exit_code for started in self._started.values())

    def apply(self, desired: Desired) -> bool:
        """Run what is desired; return False if it was applied already."""
        state = msgspec.structs.replace(desired, number=0, seen=0.0)
        if desired.number <= self._num_applied or state == self._applied:
            return False
        self._num_applied, self._applied = desired.number, state
        if desired.session != self._session:
            self.end_processes()
            self._session, self._num_sweeps = desired.session, desired.sweeps
        self._hold_ports(desired)
        if desired.sweeps != self._num_sweeps:
            self._sweep(desired)
        for process in desired.processes:
            if process.number not in self._started:
                self._start(process)
            self._signal(process, self._started[process.number])
        return True

    def _hold_ports(self, desired: Desired) -> None:
        self._port_error = ""
        try:
            for name in desired.listeners:
                if name not in self._ports:
                    self._ports[name] = self._reserved.reserve(self._facts.host, preferred=desired.preferred_ports.get(name, 0))
        except ConfigError as exc:
            self._port_error = str(exc)

    def _sweep(self, desired: Desired) -> None:
        """Kill what outlived the processes that started it, and the processes that are not desired any more."""
        kept = {process.number for process in desired.processes}
        for number in self._started.keys() - kept:
            self._forget(number)
        children = (started.child for started in self._started.values())
        self._host.end_orphans(spared=[child for child in children if child is not None])
        self._num_sweeps = desired.sweeps

    def _forget(self, number: int) -> None:
        started = self._started.pop(number)
        self._reader.forget(number)
        if started.child is not None:
            started.child.signal_group(signal.SIGKILL)  # mostly it has ended

    def _start(self, process: DesiredProcess) -> None:
        for number in [number for number, started in self._started.items() if started.name == process.spec.name]:
            self._forget(number)
        spec = self._scratch.redirect(process.spec)
        try:
            spec = self._own.prepare(spec, process.files) if self._own is not None else spec
            child = self._host.start(spec)
        except OSError as exc:
            self._say(f"{spec.name} cannot be started: {exc}")
            child = None
        else:
            self._say(f"started {spec.name} pid={child.pid} log={spec.log}")
            self._reader.follow(process.number, child)
        self._started[process.number] = _Started(spec.name, child)

    def _signal(self, process: DesiredProcess, started: _Started) -> None:
        for sent in process.signals[started.num_signals :]:
            if started.child is not None:
                send = started.child.signal_group if sent.does_reach_group else started.child.signal_leader
                send(signal.Signals(sent.number))
        for pids in process.shown_stacks[started.num_stacks :]:
            if started.child is not None:
                started.child.show_stacks(pids)
        started.num_signals, started.num_stacks = len(process.signals), len(process.shown_stacks)

    def observe(self) -> Observed:
        """Return what this node runs now."""
        codes = self.exit_codes  # before the logs are read, which then have the last lines
        received = self._applied.received if self._applied is not None else {}
        logs = self._own.read_logs(received) if self._own is not None else ()
        cut = {part.name for part in logs if part.is_cut}
        alive = [started.child for started in self._started.values() if started.child is not None]
        stopped = dict(zip(map(id, alive), self._host.find_stopped(alive), strict=True))
        processes: list[ObservedProcess] = []
        for (number, started), code in zip(self._started.items(), codes, strict=True):
            reports = self._reader.newest(number)
            processes.append(
                ObservedProcess(
                    number=number,
                    pid=started.child.pid if started.child is not None else 0,
                    # The launcher quotes the last lines of the log: an exit is told together with them.
                    exit_code=code if started.child is None or started.child.spec.log.name not in cut else None,
                    stopped=stopped.get(id(started.child), ()),
                    reports=reports.readable,
                    stamps=dict(reports.stamps),
                )
            )
        return Observed(
            session=self._session,
            observed_at=self._clock.now(),
            time=self._clock.unix_time(),
            ports=dict(self._ports),
            port_error=self._port_error,
            is_leaving=self.is_leaving,
            facts=self._facts,
            processes=tuple(processes),
            logs=logs,
        )

    def end_processes(self) -> None:
        """Kill every process of this node."""
        for number in list(self._started):
            self._forget(number)
        self._host.end_orphans()
