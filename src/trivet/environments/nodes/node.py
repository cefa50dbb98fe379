"""The environment workers of one other node, as the orchestrator sees them. Owned by `node_pools.NodePools`."""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from trivet.environments.workers.calls import PendingCalls
from trivet.wire.events import Event
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.worker_nodes import EndSession, FromNode, NodeBeat, StartSession, ToNode
from trivet.wire.workers import AskExample, CallOrder, Cancel, ExampleFound, GroupDone, RunGroupOrder

logger = logging.getLogger(__name__)

LOST_AFTER_S = 15.0
"""A node that has said nothing for this long counts as lost: its groups are run again. It says how it stands once a second."""
_ASK_INTERVAL_S = 1.0
"""A node that waited for the orchestrator sends all beats of that time at once. It is asked once for what it has loaded."""
_COUNTS = "failed_groups/"
"""Metrics that are summed from one reading to the next; of the others the newest counts."""


class RemoteNode:
    """One node. It is used once it has loaded its environments, until it drains, falls silent or a new process answers for it.

    >>> node = RemoteNode(2, post=post)
    >>> node.receive(connection, message, now=clock())
    >>> if node.is_ready: rollouts = await node.run_group(request)
    """

    def __init__(self, number: int, *, post: Callable[[bytes, ToNode], None]) -> None:
        """Begin without a connection.

        Args:
            post: sends a message over the connection that the bytes name.
        """
        self.number = number
        self.infos: Mapping[str, EnvironmentInfo] | None = None
        """The environments that it has loaded; None while no session has begun."""
        self.is_refused = False
        """Its environments are not those of the run. A new process of the node is looked at again."""
        self.workers: Sequence[WorkerStatus] = ()
        self.num_pending: Counter[str] = Counter()
        """Groups that it runs, by environment."""
        self._post = post
        self._connection = b""
        self._instance = 0
        self._session = ""
        self._is_draining = False
        self._calls = PendingCalls(partial(self._send_order, ""))
        self._metrics: dict[str, float] = {}
        self._heard_at = self._ask_at = 0.0
        self._awaited: tuple[int, float] | None = None
        """A call that it has not received yet, and since when that is known."""

    @property
    def is_ready(self) -> bool:
        """True while it takes groups."""
        return self.infos is not None and not self.is_refused and not self._is_draining

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group there, as `EnvironmentPool.run_group`."""
        self.num_pending[request.env] += 1
        try:
            order = RunGroupOrder(call_id=self._calls.next_id(), request=request)
            return (await self._calls.call(order, GroupDone)).rollouts
        finally:
            self.num_pending[request.env] -= 1

    async def example(self, env: str, *, split: Split, example_id: int) -> Example:
        """Ask for an example, as `EnvironmentPool.example`."""
        order = AskExample(call_id=self._calls.next_id(), env=env, split=split, example_id=example_id)
        return (await self._calls.call(order, ExampleFound)).example

    def take_metrics(self) -> dict[str, float]:
        """Return the node's metrics since the last call."""
        taken = self._metrics
        self._metrics = {name: value for name, value in taken.items() if not name.startswith(_COUNTS)}
        return taken

    def receive(self, connection: bytes, message: FromNode, *, now: float) -> Sequence[Event]:
        """Take a message of the node; returns events that it tells of.

        Raises:
            MessageRefused: it answers a call that was never made.
        """
        body = message.body
        if message.instance < self._instance:  # an older process of the node, which a newer one has replaced
            if isinstance(body, NodeBeat):
                self._post(connection, ToNode(session=message.session, body=EndSession()))
            return ()
        self._connection, self._heard_at = connection, now
        if message.instance > self._instance:
            reason = f"the environment workers of node {self.number} were started again"
            if self.infos is not None:
                logger.warning("%s; their groups are retried", reason)
            self._start_session(reason)
            self._instance, self.is_refused, self._is_draining = message.instance, False, False
        is_current = message.session == self._session
        if not isinstance(body, NodeBeat):
            if is_current:
                self._calls.resolve(body)
            return ()
        if is_current:
            self._note_beat(body, now=now)
        if body.is_draining and not (is_current and self._calls.ids):
            self._post(connection, ToNode(session=message.session, body=EndSession()))
            self._start_session(f"node {self.number} has left")
        elif self.infos is None and now >= self._ask_at:
            self._ask_at = now + _ASK_INTERVAL_S
            self._post(connection, ToNode(session=self._session, body=StartSession()))
        return body.events if is_current else ()

    def end_session(self) -> None:
        """Tell the node that the orchestrator ends, so that it cancels its calls and may end too."""
        self._post(self._connection, ToNode(session=self._session, body=EndSession()))
        self._start_session("the orchestrator ends")

    def restart_silence(self, *, now: float) -> None:
        """Count the node's silence from now: this process did not run for a while, so it could not hear the node."""
        self._heard_at, self._awaited = now, None

    def check(self, *, now: float) -> str:
        """Mark the node lost if it is silent or misses an order; return why, empty when it is well or was not in use."""
        if now - self._heard_at > LOST_AFTER_S:
            reason = f"nothing was heard from the environment workers of node {self.number} for {LOST_AFTER_S:g} s"
        elif self._awaited is not None and now - self._awaited[1] > LOST_AFTER_S:
            reason = f"groups do not reach the environment workers of node {self.number}"
        else:
            return ""
        was_used, self._instance = self.infos is not None, 0  # an older process may serve now, if there is one
        self._start_session(reason)
        return reason if was_used else ""

    def _note_beat(self, beat: NodeBeat, *, now: float) -> None:
        self.infos = beat.infos or self.infos
        self.workers = beat.workers
        for name, value in beat.metrics.items():
            self._metrics[name] = value + (self._metrics.get(name, 0.0) if name.startswith(_COUNTS) else 0.0)
        if beat.is_draining and not self._is_draining:
            logger.info("node %d: its environment workers finish %d groups and then end", self.number, len(self._calls.ids))
        self._is_draining = beat.is_draining
        running, pending = set(beat.running), set(self._calls.ids)
        where = f"node {self.number}, which leaves," if beat.is_draining else f"the connection to node {self.number}"
        for call_id in pending - running:
            if call_id <= beat.newest_call:
                self._calls.lose(call_id, f"{where} lost it")
        for call_id in running - pending:  # given up, and the node has not heard it
            self._send_order(self._session, Cancel(call_id=call_id))
        if self._awaited is not None and beat.newest_call >= self._awaited[0]:
            self._awaited = None
        if self._awaited is None and beat.newest_call < self._calls.newest:
            self._awaited = self._calls.newest, now

    def _start_session(self, reason: str) -> None:
        """Start a session, in which nothing runs: what the node was given before is lost for `reason`."""
        self.infos, self.workers, self._awaited, self._ask_at = None, (), None, 0.0
        self._metrics = {name: value for name, value in self._metrics.items() if name.startswith(_COUNTS)}
        self._session = secrets.token_hex(8)
        before, self._calls = self._calls, PendingCalls(partial(self._send_order, self._session))
        before.fail_all(reason)

    def _send_order(self, session: str, order: CallOrder) -> None:
        if session == self._session:  # a call of an earlier session may be cancelled late
            self._post(self._connection, ToNode(session=session, body=order))
