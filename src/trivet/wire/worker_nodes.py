"""Defines the messages between the orchestrator and the environment workers of another node.

Each node has its own `WorkerPool`, which restarts and limits the workers there. Calls and their answers are those of a worker
(`wire.workers`). A message may be lost with its connection, so a node reports every second what it has received and still runs.
"""

import msgspec

from trivet.wire.events import EnvLoad, EnvRestart
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.status import WorkerStatus
from trivet.wire.workers import CallAnswer, CallOrder


class StartSession(msgspec.Struct, frozen=True, tag=True):
    """Starts a session. The node cancels the calls of the session before and answers with a beat that has `infos`."""


class EndSession(msgspec.Struct, frozen=True, tag=True):
    """Ends the session. The node cancels its calls. A node that drains has then done its work."""


class NodeBeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node's state. Sent about once a second."""

    newest_call: int
    """The highest call id that it has received in this session; -1 for none."""
    running: list[int]
    """Ids of the calls that still run there."""
    is_draining: bool = False
    """The node finishes its calls and takes no others. The orchestrator ends the session once it has every answer."""
    infos: dict[str, EnvironmentInfo] | None = None
    """The environments that the node has loaded, by name. Only the answer to `StartSession` has them."""
    workers: list[WorkerStatus] = []
    metrics: dict[str, float] = {}
    """The metrics that `EnvironmentPool.metrics` returned since the last beat."""
    events: list[EnvLoad | EnvRestart] = []
    """The events since the last beat. The first beat of a session also has an `EnvLoad` for each environment."""


class ToNode(msgspec.Struct, frozen=True):
    """Envelope of a message to a node, with the session to which the message belongs."""

    session: str
    """Id of the session of the orchestrator with this node. A new id starts a new session."""
    body: StartSession | EndSession | CallOrder


class FromNode(msgspec.Struct, frozen=True, kw_only=True):
    """Envelope of a message from a node, with its sender and its session."""

    node: int
    """Number of the node."""
    instance: int
    """Time at which the node's process was started, nanoseconds since the epoch. The newest process of a node counts."""
    session: str
    """The session to which the message belongs; empty while there is none."""
    body: NodeBeat | CallAnswer
