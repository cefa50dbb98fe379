"""Reads events.jsonl of one or more attempts and says what really happened: what a resume voided is taken out."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.orchestrator.checkpoint import OrchestratorHalf
from trivet.telemetry.events import read_events
from trivet.wire.codec import decode
from trivet.wire.events import BatchFormed, Dispatch, Drop, Event, Filter, Finish, Load, Publish, Start, Train


@dataclass
class History:
    dispatched: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    ended: Counter[int] = field(default_factory=Counter)
    """Groups batched, filtered or dropped, with how often."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    trained: dict[int, list[int]] = field(default_factory=dict)
    order: list[Event] = field(default_factory=list)


def effective_events(path: Path, *, max_steps: int) -> list[Event]:
    """The events that count: without what a later start voided, or would void after the last step (see trivet.wire.events)."""
    by_role: dict[str, list[Event]] = {}
    order: list[Event] = []
    for event in read_events(path):
        mine = by_role.setdefault(event.role, [])
        if isinstance(event, Start) and mine:
            kept = _behind_nothing(mine, event.from_step) if event.role == "orchestrator" else _up_to(mine, event.from_step)
            keeps = {id(old) for old in kept}
            order = [old for old in order if old.role != event.role or id(old) in keeps]
            mine[:] = kept
        mine.append(event)
        order.append(event)
    kept = {id(event) for event in _behind_nothing(by_role["orchestrator"], max_steps)}
    return [event for event in order if event.role != "orchestrator" or id(event) in kept]


def _up_to(events: list[Event], step: int) -> list[Event]:
    """The trainer's: those of later steps and versions are void."""
    return [event for event in events if max(getattr(event, "step", 0), getattr(event, "version", 0)) <= step]


def _behind_nothing(events: list[Event], step: int) -> list[Event]:
    """The orchestrator's: those behind its batch `step` are void."""
    if step == 0:
        return []
    cut = max(place for place, event in enumerate(events) if isinstance(event, BatchFormed) and event.step == step)
    return events[: cut + 1]


def read_history(path: Path, *, max_steps: int) -> History:
    history = History()
    for event in effective_events(path, max_steps=max_steps):
        history.order.append(event)
        match event:
            case Dispatch():
                history.dispatched.add(event.group_id)
            case Finish():
                history.finished.add(event.group_id)
            case Filter() | Drop():
                history.ended[event.group_id] += 1
            case BatchFormed():
                history.batches[event.step] = event.group_ids
                history.ended.update(event.group_ids)
            case Train():
                assert event.step not in history.trained, f"step {event.step} was trained twice"
                history.trained[event.step] = event.group_ids
            case _:
                pass
    return history


def assert_exactly_once(layout: RunLayout, *, max_steps: int, max_off_policy_steps: int = 8) -> History:
    """Every group dispatched is trained once, or out with its reason, or in the last checkpoint; versions are what they say."""
    history = read_history(layout.events, max_steps=max_steps)
    twice = [group_id for group_id, count in history.ended.items() if count > 1]
    assert not twice, f"groups that ended more than once: {twice}"
    assert list(history.trained) == list(range(1, max_steps + 1))
    assert history.trained == history.batches
    owed = decode((layout.checkpoint_step(max_steps) / "orchestrator" / "state.msgpack").read_bytes(), OrchestratorHalf)
    ready = {group.group_id for group in owed.buffer.ready}
    in_flight = set(owed.buffer.in_flight_ids)
    assert history.dispatched - set(history.ended) == ready | in_flight
    assert ready <= history.finished
    assert history.dispatched == set(range(owed.next_group_id))
    digests = {event.version: event.digest for event in history.order if isinstance(event, Publish)}
    for event in history.order:
        if isinstance(event, Load) and event.version in digests:
            assert event.digest == digests[event.version]
        if isinstance(event, BatchFormed):
            assert event.step - 1 - max_off_policy_steps <= event.oldest_version <= event.newest_version <= event.step - 1
    return history
