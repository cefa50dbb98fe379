"""Defines what the head of a run and the agents of its other nodes say to each other.

An agent says how it stands, again and again (`Beat`); the head answers each time with the orders that the agent has not carried out
(`Orders`). Orders are numbered and carried out once each, in their order: a message that is lost costs half a second.
"""

from pathlib import Path

import msgspec

from trivet.launcher.node_plan import Node
from trivet.launcher.plan import ProcessSpec, RecoveryUnit, ReportFile
from trivet.machine import Machine
from trivet.wire.status import ProcessReport


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The introduction of an agent: its node, without ports yet."""

    index: int
    name: str
    host: str
    interface: str
    gpus: tuple[str, ...]
    num_cpus: int
    instance: str
    """The agent's own name, which it keeps over its connections."""
    version: str
    """Version of trivet."""
    config_digest: str
    """Digest of the configuration that the node's command read."""
    does_see_lock: bool
    """Whether it sees that the head holds the lock on the output directory."""

    def node(self, ports: dict[str, int]) -> Node:
        """Return the node, which holds `ports`."""
        machine = Machine(gpus=self.gpus, num_cpus=self.num_cpus)
        return Node(index=self.index, name=self.name, host=self.host, interface=self.interface, machine=machine, ports=ports)


class RemoteState(msgspec.Struct, frozen=True, kw_only=True):
    """One process of an agent."""

    order: int
    """The number of the order that started it."""
    pid: int
    exit_code: int | None = None
    stopped: tuple[int, ...] = ()
    """Pids of those of its processes that a signal has stopped."""
    reports: tuple[ProcessReport, ...] = ()
    """With times of the agent's clock."""
    stamps: dict[str, tuple[int, int] | None] = {}


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How an agent stands."""

    number: int
    time: float
    """Unix seconds of the agent's clock, which may be hours off: only what is said of a report's age depends on it."""
    num_done: int
    """Orders that it has carried out."""
    ports: dict[str, int] = {}
    """Ports that it holds, by the names of what will listen."""
    port_error: str = ""
    """Why it holds none."""
    is_leaving: bool = False
    """Whether a signal has asked this node to end."""
    processes: list[RemoteState] = []


class HoldPorts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Hold a free port for each name; one that is held already stays."""

    names: tuple[str, ...]
    preferred: dict[str, int] = {}


class StartProcess(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a process."""

    name: str
    unit: str
    argv: tuple[str, ...]
    log: str
    env: dict[str, str]
    env_defaults: dict[str, str]
    does_finish: bool
    reports: tuple[tuple[str, str], ...]
    are_children_watched: bool

    @classmethod
    def of(cls, spec: ProcessSpec) -> "StartProcess":
        """Return the order to start `spec`."""
        return cls(
            name=spec.name,
            unit=spec.unit,
            argv=spec.argv,
            log=str(spec.log.absolute()),
            env=dict(spec.env),
            env_defaults=dict(spec.env_defaults),
            does_finish=spec.does_finish,
            reports=tuple((report.process, str(report.path.absolute())) for report in spec.reports),
            are_children_watched=spec.are_children_watched,
        )

    def spec(self, node: int) -> ProcessSpec:
        """Return what the agent of `node` starts."""
        return ProcessSpec(
            name=self.name,
            unit=RecoveryUnit(self.unit),
            argv=self.argv,
            log=Path(self.log),
            env=self.env,
            env_defaults=self.env_defaults,
            does_finish=self.does_finish,
            reports=tuple(ReportFile(process=process, path=Path(path)) for process, path in self.reports),
            are_children_watched=self.are_children_watched,
            node=node,
        )


class SignalProcess(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send a signal to a process."""

    process: int
    """The number of the order that started it."""
    signal: int
    does_reach_group: bool


class EndOrphans(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Kill what outlived the processes that started it."""

    spared: tuple[int, ...]


class ShowStacks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have processes write their stacks into their logs."""

    process: int
    pids: tuple[int, ...]


class EndRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End every process of the run, then the agent itself: the run is over."""

    exit_code: int


Order = HoldPorts | StartProcess | SignalProcess | EndOrphans | ShowStacks | EndRun


class Orders(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The head's answer to a `Beat`."""

    beat: int
    """The number of the newest beat that arrived."""
    first: int
    """The number of the first order below."""
    orders: list[Order] = []
    lost_after_s: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The head's answer to an agent that it does not want."""

    reason: str
    is_final: bool = False
    """True when asking again would change nothing."""
    is_old_start: bool = False
    """True when the scheduler may have started this node with what an earlier start of the job decided."""


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """The content of .control.json: where the head of a run listens for its nodes."""

    run: str
    attempt: int
    host: str
    port: int
