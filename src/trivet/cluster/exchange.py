"""Keeps one Ray actor for each node of a run, and exchanges states with all of them in one thread.

An actor that has ended is replaced in its bundle: Ray finds another machine for the bundle when its own is gone. The new actor
starts nothing before the node of the old one counts as lost. Ray says of an actor that it has ended in two cases. Either its
process ended on a machine that Ray still reaches: then the processes of the node have ended with it, which counts at once. Or Ray
counts the machine as dead, which may only be cut off: then the node counts as lost when nothing was heard from it for
`deployment.lost_after_s`, because its fence has ended its processes by then.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trivet.cluster.actor import NodeActor
from trivet.cluster.bundles import BundleGroup
from trivet.cluster.messages import ActorSettings, NodeFacts, Observed, decode, encode
from trivet.cluster.table import NodeTable
from trivet.errors import NodesMissing

_POLL_INTERVAL_S = 0.1
_SEND_INTERVAL_S = 0.5
"""An actor that answers nothing new is asked again after this long."""
_MAX_CALLS = 2
"""Calls of one actor that wait for their answer: one waits for news of the actor, one brings it news."""
_GET_TIMEOUT_S = 1.0
"""An answer that is there is small enough to be here already."""
_CLOSE_TIMEOUT_S = 5.0
_SHORT_LIFE_S = 30.0
_MAX_SHORT_LIVES = 4
"""Actors of one node in a row that ended within `_SHORT_LIFE_S`, after which the run ends: another would meet the same."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """The actor of one node."""

    group: Any
    """Ray's placement group."""
    bundle: int
    num_gpus: float
    actor: Any = None
    does_take_part: bool = False
    """A new actor waits until the node of the one before it counts as lost."""
    calls: list[Any] = field(default_factory=list[Any])
    sent_at: float = 0.0
    machine: str = ""
    """Ray's id of the actor's machine; empty before its first answer."""
    begun_at: float = 0.0
    """When that came."""
    num_short_lives: int = 0


class Exchange:
    """The actors of a run's nodes.

    >>> with Exchange(table, groups, settings, check=check_machine, fail=guard.fail, say=say):
    ...     supervise(ClusterHost(table))
    """

    def __init__(
        self,
        table: NodeTable,
        groups: Mapping[Any, BundleGroup],
        settings: ActorSettings,
        *,
        check: Callable[[int, NodeFacts], None],
        fail: Callable[[Exception], None],
        say: Callable[[str], None],
    ) -> None:
        """Make an actor for each bundle, without waiting for a place.

        Args:
            groups: Ray's placement groups, and what they are for.
            settings: those of every actor, besides the number of its node.
            check: raises when a machine does not fit the run.
            fail: called when the nodes cannot be reached any more, or a machine was refused.
            say: prints a message about a node.
        """
        self._table = table
        self._settings = settings
        self._check = check
        self._fail = fail
        self._say = say
        self._slots = {
            node: _Slot(group=placed, bundle=bundle, num_gpus=group.num_gpus)
            for placed, group in groups.items()
            for bundle, node in enumerate(group.nodes)
        }
        self._class = ray.remote(NodeActor)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)

    def __enter__(self) -> "Exchange":
        for node in self._slots:
            self._make_actor(node)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Have every node end its processes, and wait a moment until it has. Ray ends the actors and bundles with the driver."""
        self._table.finish()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while not self._table.is_finished and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        self._is_closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _make_actor(self, node: int) -> None:
        slot = self._slots[node]
        settings = msgspec.structs.replace(self._settings, node=node)
        slot.actor = self._class.options(
            num_cpus=0,
            num_gpus=slot.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_MAX_CALLS + 1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle),
        ).remote(encode(settings))

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._send()
                self._receive()
        except RayError as exc:
            self._fail(NodesMissing(f"the nodes cannot be reached through Ray any more: {exc}"))
        except Exception as exc:  # noqa: BLE001  # the supervisor raises it
            self._fail(exc)

    def _send(self) -> None:
        now = time.monotonic()
        for node, slot in self._slots.items():
            if not slot.does_take_part and self._table.is_lost(node, now=now):
                self._table.begin_session(node)
                slot.does_take_part = True
            if not slot.does_take_part or len(slot.calls) >= _MAX_CALLS:
                continue
            is_due = not slot.calls and now - slot.sent_at >= _SEND_INTERVAL_S
            if (message := self._table.next_message(node, only_news=bool(slot.calls) or not is_due)) is not None:
                slot.calls.append(slot.actor.exchange.remote(encode(message)))
                slot.sent_at = now

    def _receive(self) -> None:
        owners = {call: node for node, slot in self._slots.items() for call in slot.calls}
        if not owners:
            self._is_closing.wait(_POLL_INTERVAL_S)
            return
        done, _ = ray.wait(list(owners), num_returns=1, timeout=_POLL_INTERVAL_S)
        for call in done:
            node = owners[call]
            slot = self._slots[node]
            if call not in slot.calls:
                continue  # its actor was replaced in this round
            try:
                answer = ray.get(call, timeout=_GET_TIMEOUT_S)
            except ActorUnavailableError:
                slot.calls.remove(call)  # it may or may not have arrived, and is sent again
            except ActorDiedError as exc:
                self._replace(node, exc)
            except GetTimeoutError:
                continue
            else:
                self._take(node, call, answer)

    def _take(self, node: int, call: Any, answer: object) -> None:
        if not isinstance(answer, bytes):
            raise TypeError(f"the actor of node {node} answered with {type(answer).__name__}, and not with bytes")
        slot = self._slots[node]
        slot.calls.remove(call)
        if answer:
            observed = decode(answer, Observed)
            if not slot.machine:
                self._check(node, observed.facts)
                slot.machine, slot.begun_at = observed.facts.ray_node, time.monotonic()
            self._table.receive(node, observed, now=time.monotonic(), unix_time=time.time())
            slot.sent_at = 0.0  # so that the node learns at once that it was seen

    def _replace(self, node: int, error: RayError) -> None:
        """Have another actor made for a node whose actor has ended."""
        slot = self._slots[node]
        was_short = not slot.machine or time.monotonic() - slot.begun_at < _SHORT_LIFE_S
        slot.num_short_lives = slot.num_short_lives + 1 if was_short else 0
        if slot.num_short_lives >= _MAX_SHORT_LIVES:
            raise NodesMissing(f"node {node} does not stay up: {error}")
        if slot.machine and self._is_reached(slot.machine):
            self._say(f"the actor of node {node} has ended, and its processes with it: making another")
            self._table.begin_session(node)
        slot.does_take_part, slot.machine = False, ""
        slot.calls.clear()
        self._make_actor(node)

    @staticmethod
    def _is_reached(machine: str) -> bool:
        """Return whether Ray still reaches a machine."""
        return any(node["NodeID"] == machine and node["Alive"] for node in ray.nodes())
