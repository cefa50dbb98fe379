"""Defines the messages between the orchestrator and the environment workers of another node.

Each node has a pool of its own (`WorkerPool`), which restarts and limits its workers there. Groups go to it and answers come back.
A message may be lost with its connection, so a node says again and again what it has received and what it still runs.
"""

import msgspec

from trivet.wire.events import EnvLoad, EnvRestart
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.status import WorkerStatus
from trivet.wire.workers import AskPrompt, CallFailed, Cancel, GroupDone, PromptFound, RunGroupOrder


class StartSession(msgspec.Struct, frozen=True, tag=True):
    """Starts a session. The node cancels the calls of the session before, and says what it has loaded."""


class AskNodePrompt(AskPrompt, frozen=True, tag=True):
    """Order to return the prompt of an example of one of the node's environments."""

    env: str


class NodeBeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node's state. Sent about once a second."""

    newest_call: int
    """The highest call id that it has received in this session; -1 for none."""
    running: list[int]
    """Calls that it has neither answered nor lost."""
    workers: list[WorkerStatus] = []
    metrics: dict[str, float] = {}
    """As `EnvironmentPool.metrics` since the last beat."""
    events: list[EnvLoad | EnvRestart] = []
    """What happened since the last beat; in the first one of a session, which environments are loaded."""


class PoolLoaded(msgspec.Struct, frozen=True, tag=True):
    """Answer to `StartSession`."""

    infos: dict[str, EnvironmentInfo]


class CallLost(msgspec.Struct, frozen=True, tag=True):
    """Answer to a call whose worker ended while it ran; it may be asked again."""

    call_id: int
    message: str


NodeAnswer = NodeBeat | PoolLoaded | GroupDone | PromptFound | CallFailed | CallLost


class ToNode(msgspec.Struct, frozen=True):
    """Envelope of what a node is told."""

    session: str
    """Id of the session of the orchestrator with this node; a new id starts a new session."""
    body: StartSession | RunGroupOrder | AskNodePrompt | Cancel


class FromNode(msgspec.Struct, frozen=True, kw_only=True):
    """Envelope of what a node says."""

    node: int
    instance: str
    """Random id of the node's process."""
    session: str
    """The newest that it was told; empty for none."""
    body: NodeAnswer
