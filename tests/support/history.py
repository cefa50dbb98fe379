"""Reads events.jsonl of one or more attempts and says what really happened: what a resume voided is taken out."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from trivet.telemetry.events import read_events
from trivet.wire.events import BatchFormed, Commit, Dispatch, Drop, Filter, Finish, Load, Publish, Start, Train


@dataclass
class History:
    dispatched: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    ended: Counter[int] = field(default_factory=Counter)
    """Groups batched, filtered or dropped, with how often."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    trained: dict[int, list[int]] = field(default_factory=dict)
    loads: list[int] = field(default_factory=list)
    order: list[object] = field(default_factory=list)


def effective_events(path: Path) -> list[object]:
    """The events that count: a role's Start with from_step N voids what it wrote behind its step N in earlier attempts."""
    by_role: dict[str, list[object]] = {}
    order: list[object] = []
    for event in read_events(path):
        mine = by_role.setdefault(event.role, [])
        if isinstance(event, Start) and mine:
            cut = _behind_step(mine, event.from_step)
            voided = {id(old) for old in mine[cut:]}
            order = [old for old in order if id(old) not in voided]
            del mine[cut:]
        mine.append(event)
        order.append(event)
    return order


def _behind_step(events: list[object], step: int) -> int:
    for place in range(len(events) - 1, -1, -1):
        event = events[place]
        if isinstance(event, BatchFormed | Commit) and event.step == step:
            return place + 1
        if isinstance(event, Start) and event.from_step == step:
            return place + 1
    return 0


def read_history(path: Path) -> History:
    history = History()
    for event in effective_events(path):
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
            case Load():
                history.loads.append(event.version)
            case _:
                pass
    return history


def assert_exactly_once(path: Path, *, max_steps: int) -> History:
    """No group trained twice, none that finished lost, every batch trained as it was formed, versions true to their digests."""
    history = read_history(path)
    twice = [group_id for group_id, count in history.ended.items() if count > 1]
    assert not twice, f"groups that ended more than once: {twice}"
    assert list(history.trained) == list(range(1, max_steps + 1))
    assert history.trained == history.batches
    digests = {event.version: event.digest for event in history.order if isinstance(event, Publish)}
    for event in history.order:
        if isinstance(event, Load) and event.version in digests:
            assert event.digest == digests[event.version]
        if isinstance(event, BatchFormed):
            assert event.newest_version <= event.step - 1
    waiting = history.finished - set(history.ended)
    assert all(group_id > 0 for group_id in waiting)
    return history
