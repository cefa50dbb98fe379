"""Defines the messages between the orchestrator and the environment workers of another node.

Each node has its own `WorkerPool`, which restarts and limits the workers there. The orchestrator sends groups to the node and gets
their results back. A message may be lost with its connection, so a node reports every second what it has received and still runs.
"""

import msgspec

from trivet.wire.events import EnvLoad, EnvRestart
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.status import WorkerStatus
from trivet.wire.workers import AskPrompt, CallFailed, Cancel, GroupDone, PromptFound, RunGroupOrder


class StartSession(msgspec.Struct, frozen=True, tag=True):
    """Starts a session. The node cancels the calls of the session before and answers with `PoolLoaded`."""


class AskNodePrompt(AskPrompt, frozen=True, tag=True):
    """Order to return the prompt of an example of one of the node's environments."""

    env: str


class NodeBeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node's state. Sent about once a second."""

    newest_call: int
    """The highest call id that it has received in this session; -1 for none."""
    running: list[int]
    """Ids of the calls that still run there."""
    workers: list[WorkerStatus] = []
    metrics: dict[str, float] = {}
    """The metrics that `EnvironmentPool.metrics` returned since the last beat."""
    events: list[EnvLoad | EnvRestart] = []
    """The events since the last beat. The first beat of a session also has an `EnvLoad` for each environment."""


class PoolLoaded(msgspec.Struct, frozen=True, tag=True):
    """Answer to `StartSession`: the environments that the node has loaded, by name."""

    infos: dict[str, EnvironmentInfo]


class CallLost(msgspec.Struct, frozen=True, tag=True):
    """Answer to a call whose worker ended while the call ran. The call may be made again."""

    call_id: int
    message: str


NodeAnswer = NodeBeat | PoolLoaded | GroupDone | PromptFound | CallFailed | CallLost


class ToNode(msgspec.Struct, frozen=True):
    """Envelope of a message to a node, with the session to which the message belongs."""

    session: str
    """Id of the session of the orchestrator with this node. A new id starts a new session."""
    body: StartSession | RunGroupOrder | AskNodePrompt | Cancel


class FromNode(msgspec.Struct, frozen=True, kw_only=True):
    """Envelope of a message from a node, with its sender and its session."""

    node: int
    """Index of the node."""
    instance: str
    """Random id of the node's process. It changes when the process is started again."""
    session: str
    """The session to which the message belongs; empty before the first."""
    body: NodeAnswer
