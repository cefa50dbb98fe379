"""Good histories pass, whatever happened in them. Each kind of corruption is named at its line."""

import copy
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.histories import RunMaker, replay_events
from trivet.history.ledger import Invariant
from trivet.wire.events import (
    AnyEvent,
    BatchFormed,
    Commit,
    Dispatch,
    Drop,
    Filter,
    Finish,
    Load,
    Publish,
    Retire,
    ServerUp,
    Start,
    Train,
)

ONCE, VERSIONS, COMMIT, READERS, RECORD = Invariant


@given(seed=st.integers(0, 10**9), max_steps=st.integers(1, 25))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_run_that_keeps_its_promises_passes_whatever_happens_to_it(seed, max_steps):
    events = RunMaker(Random(seed), max_steps=max_steps).run()
    history = replay_events(events)
    assert not history.ledger.breaches, history.ledger.breaches[0]
    assert history.last_step == max_steps
    counts, live = history.groups.state, history.groups.state.pending
    ended = counts.batched + counts.filtered.total() + counts.dropped.total()
    assert counts.dispatched == ended + len(live.ready) + len(live.in_flight)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_fork_whose_first_checkpoint_is_gone_passes(seed):
    """The events after a resume are those that a fork of the run would have written."""
    events = RunMaker(Random(seed), max_steps=15).run()
    resumes = [place for place, event in enumerate(events) if isinstance(event, Start) and event.from_step]
    assume(resumes)
    forked = events[resumes[0] :]
    later = [event.from_step for event in forked if isinstance(event, Start)]
    first_step = later[0]
    assume(min(later) >= first_step)  # a fork never goes back to before it began
    history = replay_events(forked, first_step=first_step)
    assert not history.ledger.breaches, history.ledger.breaches[0]
    place = last(forked, BatchFormed)
    twice = [*forked[: place + 1], copy.deepcopy(forked[place]), *forked[place + 1 :]]
    assert replay_events(twice, first_step=first_step).ledger.breaches


History = list[AnyEvent]
Corruption = Callable[[History], int]
"""A function that damages a history and returns the line at which the checker must notice."""


def unbroken(seed: int = 3) -> History:
    return RunMaker(Random(seed), max_steps=12, max_crashes=0).run()


def last(events: History, kind: type[AnyEvent], where: Callable[[AnyEvent], bool] = lambda _: True) -> int:
    return max(place for place, event in enumerate(events) if isinstance(event, kind) and where(event))


def first(events: History, kind: type[AnyEvent], where: Callable[[AnyEvent], bool] = lambda _: True) -> int:
    return min(place for place, event in enumerate(events) if isinstance(event, kind) and where(event))


def with_probes(events: History, mismatch: float | None = 1e-6) -> History:
    """Give each published policy a probe, which every server that loads it reproduces up to `mismatch`."""
    for event in events:
        if isinstance(event, Publish):
            event.num_probe_tokens = 61
        elif isinstance(event, Load) and event.version:
            event.probe_mismatch, event.probe_limit = mismatch, 1e-3
    return events


def test_servers_that_reproduce_each_probe_are_consistent() -> None:
    history = replay_events(with_probes(unbroken()))
    assert not history.ledger.breaches
    assert len(history.policies.probe_mismatches) == sum(isinstance(e, Load) and e.version > 0 for e in unbroken())


@pytest.mark.parametrize("mismatch", [None, 2e-3])
def test_a_server_that_serves_a_policy_without_reproducing_its_probe_is_found(mismatch: float | None) -> None:
    events = with_probes(unbroken())
    place = last(events, Load)
    load = events[place]
    assert isinstance(load, Load)
    load.probe_mismatch = mismatch
    (breach,) = replay_events(events).ledger.breaches
    assert breach.invariant is VERSIONS
    assert (breach.line, "log-probabilities of its probe" in breach.reason) == (place + 1, True)


def test_a_damaged_policy_that_is_published_again_has_the_new_probe_of_the_run() -> None:
    def resume(num_probe_tokens: int) -> History:
        events = with_probes(unbroken())
        commit = next(event for event in events[last(events, Commit) :: -1] if isinstance(event, Commit))
        place = last(events, Publish, lambda event: isinstance(event, Publish) and event.version == commit.step)
        again = copy.deepcopy(events[place])
        start = copy.deepcopy(events[first(events, Start, lambda event: event.role == again.role)])
        assert isinstance(again, Publish)
        assert isinstance(start, Start)
        start.from_step, start.attempt, again.attempt, again.num_probe_tokens = commit.step, 2, 2, num_probe_tokens
        load = Load(version=again.version, digest=again.digest, server="http://a")
        load.role, load.attempt = "orchestrator", 1
        return [*events, start, again, load]

    def breaches(events: History) -> list[str]:
        return [breach.reason for breach in replay_events(events).ledger.breaches if "of its probe" in breach.reason]

    assert len(breaches(resume(num_probe_tokens=61))) == 1
    assert not breaches(resume(num_probe_tokens=0))


def repeat(kind: type[AnyEvent]) -> Corruption:
    def spoil(events: History) -> int:
        place = last(events, kind)
        events.insert(place + 1, copy.deepcopy(events[place]))
        return place + 2

    return spoil


def change(kind: type[AnyEvent], where: Callable[[AnyEvent], bool] = lambda _: True, **fields: object) -> Corruption:
    def spoil(events: History) -> int:
        place = last(events, kind, where)
        for name, value in fields.items():
            setattr(events[place], name, value)
        return place + 1

    return spoil


def a_group_trained_in_two_batches(events: History) -> int:
    earlier, later = first(events, BatchFormed), last(events, BatchFormed)
    events[later].group_ids[0] = events[earlier].group_ids[0]
    return later + 1


def a_trained_group_is_dispatched_again(events: History) -> int:
    batch = first(events, BatchFormed)
    again = copy.deepcopy(events[first(events, Dispatch, lambda event: event.group_id == events[batch].group_ids[0])])
    events.insert(batch + 1, again)
    return batch + 2


def a_batch_trained_with_other_groups(events: History) -> int:
    place = last(events, Train)
    events[place].group_ids[0] += 1
    return place + 1


def a_batch_trained_before_it_was_formed(events: History) -> int:
    train = last(events, Train)
    formed = last(events, BatchFormed, lambda event: event.step == events[train].step)
    events.insert(formed, events.pop(train))
    return formed + 1


def a_step_left_out(events: History) -> int:
    step = last(events, BatchFormed) and events[last(events, BatchFormed)].step - 1
    del events[last(events, Train, lambda event: event.step == step)]
    return last(events, Publish, lambda event: event.version == step) + 1


def a_dispatch_left_out(events: History) -> int:
    group_id = events[first(events, BatchFormed)].group_ids[0]
    events[:] = [event for event in events if not (isinstance(event, Dispatch) and event.group_id == group_id)]
    noticed = [first(events, Finish, lambda event: event.group_id == group_id)]
    noticed += [first(events, Dispatch, lambda event: event.group_id == group_id + 1)]
    return min(noticed) + 1


def a_group_that_vanishes(events: History) -> int:
    """Neither its finish nor its end is recorded. The checker notices once the group is too old to be trained."""
    batch = first(events, BatchFormed)
    group_id = events[batch].group_ids[0]
    version = events[last(events, Dispatch, lambda event: event.group_id == group_id)].version
    events[:] = [event for event in events if not (isinstance(event, Finish) and event.group_id == group_id)]
    for event in events:
        if isinstance(event, BatchFormed | Train) and group_id in event.group_ids:
            event.group_ids.remove(group_id)
    return first(events, BatchFormed, lambda event: event.step - 2 - version > 3) + 1


def a_load_before_its_publication(events: History) -> int:
    place = first(events, Load, lambda event: event.version > 0)
    published = first(events, Publish, lambda event: event.version == events[place].version)
    events.insert(published, events.pop(place))
    return published + 1


def a_server_that_goes_back(events: History) -> int:
    place = last(events, Load)
    older = copy.deepcopy(events[place])
    version = max(e.version for e in events if isinstance(e, Publish) and e.version < older.version)
    events[:] = [event for event in events if not isinstance(event, Retire)]
    place = last(events, Load)
    older.version, older.digest = version, f"digest-{version:04d}"
    events.insert(place + 1, older)
    return place + 2


def a_load_of_what_was_removed(events: History) -> int:
    retired = last(events, Retire)
    load = copy.deepcopy(events[last(events, Load)])
    load.version, load.digest = events[retired].version, f"digest-{events[retired].version:04d}"
    events.insert(retired + 1, load)
    return retired + 2


def a_removal_of_what_a_server_holds(events: History) -> int:
    place = last(events, Load)
    events.insert(place + 1, Retire(role="trainer", attempt=1, version=events[place].version))
    return place + 2


def a_start_from_what_was_never_committed(events: History) -> int:
    place = last(events, Train, lambda event: event.step == 8)
    events[:] = [event for event in events if not isinstance(event, Commit)]
    place = last(events, Train, lambda event: event.step == 8)
    del events[place + 1 :]
    events.append(Start(role="trainer", attempt=2, run_id="run", from_step=0))
    events.append(Start(role="trainer", attempt=3, run_id="run", from_step=1))
    return len(events)


def roles_that_go_back_to_different_steps(events: History) -> int:
    commits = [event.step for event in events if isinstance(event, Commit)]
    assert len(commits) > 1
    ends = len(events)
    events.append(Start(role="trainer", attempt=2, run_id="run", from_step=commits[1]))
    events.append(Start(role="orchestrator", attempt=2, run_id="run", from_step=commits[0]))
    events.append(Train(role="trainer", attempt=2, step=commits[1] + 1, group_ids=[]))
    return ends + 3


def a_resumed_group_that_finishes_undispatched(events: History) -> int:
    commit = last(events, Commit, lambda event: event.step < 12)
    step = events[commit].step
    formed = last(events, BatchFormed, lambda event: event.step == step)
    live = replay_events(events[: formed + 1]).groups.state.pending.in_flight
    del events[commit + 1 :]
    for role in ("trainer", "orchestrator"):
        events.append(Start(role=role, attempt=2, run_id="run", from_step=step))
    finish = Finish(group_id=min(live), reward_mean=0.0, oldest_version=step, newest_version=step, completion_tokens=3.0)
    finish.role, finish.attempt = "orchestrator", 2
    events.append(finish)
    return len(events)


def has_tokens(event: AnyEvent) -> bool:
    return isinstance(event, Finish) and event.newest_version >= 0


CORRUPTIONS: list[tuple[str, Invariant, Corruption]] = [
    ("a group finishes twice", ONCE, repeat(Finish)),
    ("a group is filtered twice", ONCE, repeat(Filter)),
    ("a group is dropped twice", ONCE, repeat(Drop)),
    ("a batch is formed twice", ONCE, repeat(BatchFormed)),
    ("a step is trained twice", ONCE, repeat(Train)),
    ("a filter without a reason", ONCE, change(Filter, reason="")),
    ("a drop without a reason", ONCE, change(Drop, reason="")),
    ("a group id left out", ONCE, change(Dispatch, group_id=10_000)),
    ("another run's events", ONCE, change(Start, run_id="another")),
    ("a group in two batches", ONCE, a_group_trained_in_two_batches),
    ("a trained group dispatched again", ONCE, a_trained_group_is_dispatched_again),
    ("other groups trained", ONCE, a_batch_trained_with_other_groups),
    ("trained before formed", ONCE, a_batch_trained_before_it_was_formed),
    ("a dispatch is missing", ONCE, a_dispatch_left_out),
    ("a group vanishes", ONCE, a_group_that_vanishes),
    ("an owed group is not dispatched again", ONCE, a_resumed_group_that_finishes_undispatched),
    ("a policy published without its step", VERSIONS, a_step_left_out),
    ("a load with another digest", VERSIONS, change(Load, digest="digest-of-something-else")),
    ("a policy published again with other bytes", VERSIONS, lambda events: _republish(events)),
    ("a server up with another policy than it loaded", VERSIONS, change(ServerUp, version=1_000)),
    ("a load before its publication", VERSIONS, a_load_before_its_publication),
    ("a server goes back", VERSIONS, a_server_that_goes_back),
    ("tokens newer than any policy", VERSIONS, change(Finish, has_tokens, newest_version=1_000)),
    ("tokens older than the dispatch", VERSIONS, change(Finish, has_tokens, oldest_version=0)),
    ("a batch of the policy that it makes", VERSIONS, lambda events: _batch_of_its_own_policy(events)),
    ("a batch of tokens too old", VERSIONS, change(BatchFormed, oldest_version=0)),
    ("a dispatch at a policy that nobody holds", VERSIONS, change(Dispatch, version=1_000)),
    ("a dispatch to a server that is not up", VERSIONS, change(Dispatch, server="http://elsewhere")),
    ("a step committed twice", COMMIT, repeat(Commit)),
    ("a commit of a step that was not trained", COMMIT, change(Commit, step=1_000)),
    ("a start from what was not committed", COMMIT, a_start_from_what_was_never_committed),
    ("roles at different steps", COMMIT, roles_that_go_back_to_different_steps),
    ("a load of what was removed", READERS, a_load_of_what_was_removed),
    ("a removal of what a server holds", READERS, a_removal_of_what_a_server_holds),
    ("a removal of what is not there", READERS, repeat(Retire)),
]


def _republish(events: History) -> int:
    place = last(events, Publish)
    events.insert(place + 1, Publish(role="trainer", attempt=1, version=events[place].version, digest="other bytes"))
    return place + 2


def _batch_of_its_own_policy(events: History) -> int:
    place = last(events, BatchFormed)
    events[place].newest_version = events[place].step
    return place + 1


@pytest.mark.parametrize(("name", "invariant", "spoil"), CORRUPTIONS, ids=[name for name, _, _ in CORRUPTIONS])
def test_a_corruption_is_named_with_its_invariant_and_line(name, invariant, spoil):
    events = unbroken()
    line = spoil(events)
    breaches = replay_events(events).ledger.breaches
    assert breaches, name
    assert (invariant, line) in [(breach.invariant, breach.line) for breach in breaches], breaches[0]
    assert breaches[0].line == line
