"""The environment workers of one other node, as the orchestrator sees them. Owned by `node_pools.NodePools`."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trivet.environments.workers.calls import PendingCalls
from trivet.errors import MessageRefused
from trivet.wire.events import EnvLoad, EnvRestart
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.worker_nodes import AskNodePrompt, CallLost, FromNode, NodeAnswer, NodeBeat, PoolLoaded, StartSession, ToNode
from trivet.wire.workers import CallFailed, Cancel, GroupDone, PromptFound, RunGroupOrder, WorkerOrder

logger = logging.getLogger(__name__)

LOST_AFTER_S = 15.0
"""A node that has said nothing for this long counts as lost: its groups are run again. It says how it stands once a second."""
_COUNTS = "failed_groups/"
"""Metrics that are summed from one reading to the next; of the others the newest counts."""


class RemoteNode:
    """One node. It is used when it has loaded what it should, and is lost when it falls silent or a new process answers for it.

    >>> node = RemoteNode(2, post=post)
    >>> node.receive(connection, message, now=clock())
    >>> if node.infos is not None: rollouts = await node.run_group(request)
    """

    def __init__(self, index: int, *, post: Callable[[bytes, ToNode], None]) -> None:
        """Begin without a connection.

        Args:
            post: sends a message over the connection that the bytes name.
        """
        self.index = index
        self.infos: Mapping[str, EnvironmentInfo] | None = None
        """What it has loaded; None while nothing can be run there."""
        self.workers: Sequence[WorkerStatus] = ()
        self._post = post
        self._connection = b""
        self._instance = ""
        self._session = ""
        self._calls = PendingCalls(partial(self._send_order, ""))
        self._metrics: dict[str, float] = {}
        self._heard_at = 0.0
        self._awaited: tuple[int, float] | None = None
        """A call that it has not received yet, and since when that is known."""

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group there, as `EnvironmentPool.run_group`."""
        return (await self._calls.call(RunGroupOrder(call_id=self._calls.next_id(), request=request), GroupDone)).rollouts

    async def prompt(self, env: str, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Ask for an example's prompt, as `EnvironmentPool.prompt`."""
        order = AskNodePrompt(call_id=self._calls.next_id(), env=env, split=split, example_id=example_id)
        return (await self._calls.call(order, PromptFound)).messages

    def take_metrics(self) -> dict[str, float]:
        """Return the node's metrics since the last call."""
        taken = self._metrics
        self._metrics = {name: value for name, value in taken.items() if not name.startswith(_COUNTS)}
        return taken

    def receive(self, connection: bytes, message: FromNode, *, now: float) -> Sequence[EnvLoad | EnvRestart]:
        """Take a message of the node; returns events that it tells of.

        Raises:
            EnvironmentLoadError: what it says of an environment cannot be.
        """
        self._connection, self._heard_at = connection, now
        if message.instance != self._instance:
            self._start_session(f"the environment workers of node {self.index} were started again")
            self._instance = message.instance
        is_current = message.session == self._session
        if isinstance(message.body, NodeBeat) and not (is_current and self.infos is not None):
            self._post(connection, ToNode(session=self._session, body=StartSession()))
        if not is_current:
            return ()
        try:
            return self._handle(message.body, now=now)
        except MessageRefused as exc:  # an answer that came after its call had been given up
            logger.warning("node %d sent what was not asked for: %s", self.index, exc)
            return ()

    def restart_silence(self, *, now: float) -> None:
        """Count the node's silence from now: this process did not run for a while, so it could not hear the node."""
        self._heard_at = now
        self._awaited = None

    def check(self, *, now: float) -> str:
        """Mark the node lost if it is silent or misses an order; return why, empty when it is well."""
        if self.infos is None:
            return ""
        if now - self._heard_at > LOST_AFTER_S:
            reason = f"nothing was heard from the environment workers of node {self.index} for {LOST_AFTER_S:g} s"
        elif self._awaited is not None and now - self._awaited[1] > LOST_AFTER_S:
            reason = f"groups do not reach the environment workers of node {self.index}"
        else:
            return ""
        self._start_session(reason)
        return reason

    def _handle(self, body: NodeAnswer, *, now: float) -> Sequence[EnvLoad | EnvRestart]:
        match body:
            case NodeBeat():
                self._note_beat(body, now=now)
                return body.events
            case PoolLoaded(infos=infos):
                self.infos = infos
            case CallLost(call_id=call_id, message=lost):
                self._calls.lose(call_id, lost)
            case GroupDone() | PromptFound() | CallFailed() as done:
                self._calls.resolve(done)
        return ()

    def _note_beat(self, beat: NodeBeat, *, now: float) -> None:
        self.workers = beat.workers
        for name, value in beat.metrics.items():
            self._metrics[name] = value + (self._metrics.get(name, 0.0) if name.startswith(_COUNTS) else 0.0)
        running, pending = set(beat.running), set(self._calls.ids)
        for call_id in pending - running:
            if call_id <= beat.newest_call:
                self._calls.lose(call_id, f"the connection to node {self.index} lost it")
        for call_id in running - pending:  # given up, and the node has not heard it
            self._send_order(self._session, WorkerOrder(body=Cancel(call_id=call_id)))
        if self._awaited is not None and beat.newest_call >= self._awaited[0]:
            self._awaited = None
        if self._awaited is None and beat.newest_call < self._calls.newest:
            self._awaited = self._calls.newest, now

    def _start_session(self, reason: str) -> None:
        """Start a session, in which nothing runs: what the node was given before is lost for `reason`."""
        self.infos, self.workers, self._awaited = None, (), None
        self._metrics = {name: value for name, value in self._metrics.items() if name.startswith(_COUNTS)}
        self._session = secrets.token_hex(8)
        before, self._calls = self._calls, PendingCalls(partial(self._send_order, self._session))
        before.fail_all(reason)

    def _send_order(self, session: str, order: WorkerOrder) -> None:
        assert isinstance(order.body, RunGroupOrder | AskNodePrompt | Cancel)
        if session == self._session:  # a call of an earlier session may be cancelled late
            self._post(self._connection, ToNode(session=session, body=order.body))
