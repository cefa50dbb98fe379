"""Defines what the driver of a run and the actors of its nodes tell each other.

The driver sends all that a node should run (`Desired`), again and again; the actor answers with all that it runs (`Observed`). A
message that arrives twice changes nothing, and one that is lost is replaced by the next.
"""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from trivet.launcher.node_plan import Node
from trivet.launcher.plan import ProcessSpec
from trivet.machine import Machine
from trivet.wire.status import ProcessReport

LEAVING_FILE = "TRIVET_LEAVING_FILE"
"""Variable that names a file. Once the file exists, the machine is about to be taken away; `cluster.ray_node` writes it."""


_Message = TypeVar("_Message")


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as MessagePack."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """Return the message of a kind that `data` holds. Raises `msgspec.DecodeError` if it holds another."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_make_path)


def _make_path(kind: type, value: Any) -> Path:
    assert kind is Path
    return Path(value)


class ActorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which an actor is made."""

    node: int
    working_dir: Path
    """The driver's working directory, in which every node starts its processes."""
    output_dir: Path
    """The run's directory, relative to the working directory."""
    driver_host: str
    """Address of the driver. The node's own address is that of the interface which leads there."""
    lost_after_s: float
    does_log_json: bool
    own_directories: frozenset[int] = frozenset()
    """The nodes that have directories of their own (`cluster.own_directory`) instead of `output_dir`."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine on which an actor was placed."""

    name: str
    """Host name, for messages."""
    host: str
    interface: str
    gpus: tuple[str, ...]
    """The GPUs that Ray gave to the actor."""
    num_cpus: int
    version: str
    """Version of trivet."""
    has_working_dir: bool
    """Whether the driver's working directory is there too."""
    does_see_lock: bool
    """Whether it sees that the driver holds the lock on the output directory."""
    ray_node: str
    """Ray's id of the machine."""
    niceness: int

    def node(self, index: int, ports: dict[str, int]) -> Node:
        """Return the node, which holds `ports`."""
        machine = Machine(gpus=self.gpus, num_cpus=self.num_cpus)
        return Node(index=index, name=self.name, host=self.host, interface=self.interface, machine=machine, ports=ports)


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a log of a node that has a directory of its own."""

    name: Annotated[str, msgspec.Meta(pattern=r"(?s)\A(?!/)(?!(.*/)?\.\.(/|\Z))")]
    """The path of the log below `logs/`. No name leads elsewhere."""
    offset: int
    data: bytes
    is_cut: bool = False
    """Whether the log goes on after `data`."""


class SentSignal(msgspec.Struct, frozen=True, kw_only=True):
    """A signal that a process should have received."""

    number: int
    does_reach_group: bool


class DesiredProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a node should have started."""

    number: int
    """Differs from that of every other process of the run. A process that is started again has a new number."""
    spec: ProcessSpec
    signals: tuple[SentSignal, ...] = ()
    """All signals since its start, in their order. The actor sends those that it has not sent yet."""
    shown_stacks: tuple[tuple[int, ...], ...] = ()
    """The pids of each request since its start to write stacks."""
    files: dict[str, str] = {}
    """What it reads from the output directory, by the paths there, if its node has a directory of its own."""

    def __repr__(self) -> str:  # without the files: nothing may print the secret by accident
        return f"DesiredProcess(number={self.number}, spec={self.spec}, signals={self.signals}, files={list(self.files)})"


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node should run and hold."""

    session: int
    """The driver begins a new session with a node that it had counted as lost. The processes of the old one end first."""
    number: int
    """Counts the messages of the driver. A message that was overtaken by a newer one is dropped."""
    seen: float
    """`observed_at` of the newest `Observed` of this actor that the driver has received; 0 before the first."""
    listeners: tuple[str, ...]
    """Names of what will listen on the node. It holds a free port for each."""
    preferred_ports: dict[str, int] = {}
    processes: tuple[DesiredProcess, ...] = ()
    received: dict[str, int] = {}
    """How many bytes of each log of this actor the driver has, by its path below `logs/`."""
    sweeps: int = 0
    """Raised by one to have killed what the processes of the node left behind, and each process that is not listed above."""
    is_over: bool = False
    """Whether the run is over: the node ends its processes, and gives back what it holds."""


class ObservedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a node."""

    number: int
    pid: int
    exit_code: int | None = None
    stopped: tuple[int, ...] = ()
    """Pids of those of its processes that a signal has stopped."""
    reports: tuple[ProcessReport, ...] = ()
    """With times of the node's clock."""
    stamps: dict[str, tuple[int, int] | None] = {}


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node runs and holds."""

    session: int
    """The session whose processes these are."""
    observed_at: float
    """Seconds of the node's monotonic clock. A newer state has a later time, which the driver sends back as `Desired.seen`."""
    time: float
    """Unix seconds of the node's clock, which may be hours off: only what is said of a report's age depends on it."""
    ports: dict[str, int] = {}
    port_error: str = ""
    """Why it does not hold all ports."""
    is_leaving: bool = False
    """Whether the node was asked to end, such as by a notice that its machine will be taken away."""
    facts: NodeFacts
    processes: tuple[ObservedProcess, ...] = ()
    logs: tuple[LogPart, ...] = ()
    """The next part of each log that the driver does not have whole."""
    is_over: bool = False
    """Whether the node has ended its processes and given back what it held, because the run is over."""
