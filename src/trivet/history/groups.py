"""Checks invariant 1 and the policy versions of batches: follows every group from its dispatch to its end.

`RunHistory` passes the orchestrator's events to it. It holds the live groups, which are in flight or ready. It also keeps
the groups that were live when a batch was formed, for each step that is committed or that an attempt resumes from. So its
memory does not grow with the length of the run.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec

from trivet.algorithms.dispatching import is_stale
from trivet.checkpoints.orchestrator_part import PendingGroups
from trivet.history.ledger import Invariant, Ledger
from trivet.wire.events import BatchFormed, Dispatch, Drop, Filter, Finish, RolloutsWritten
from trivet.wire.versions import PolicyVersion, Step

_ONCE, _VERSIONS = Invariant.EXACTLY_ONCE, Invariant.VERSIONS_TELL_THE_TRUTH
_NO_TOKENS = PolicyVersion(-1)
"""Version that stands in the `finish` of a group without sampled tokens."""


class LiveGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group that has not ended. A msgspec struct, because a long run has a million of them and a dataclass is ten times as
    slow.
    """

    env: str = ""
    """Empty for a group of another run's checkpoint, of which this history knows only the id."""
    example_id: int = -1
    version: PolicyVersion = PolicyVersion(0)
    """Policy version of its last dispatch."""
    must_restart: bool = False
    """The group was in flight in the checkpoint that the run went back to, and was not dispatched again yet."""
    is_finished: bool = False
    oldest: PolicyVersion = _NO_TOKENS
    newest: PolicyVersion = _NO_TOKENS
    reward_mean: float = 0.0
    """Mean reward, from the group's finish."""


@dataclass(slots=True, kw_only=True)
class GroupState:
    """The live groups at one moment, and counts of groups so far. Groups that a resume voids are not counted."""

    step: int = 0
    """The last batch formed."""
    next_group_id: int = 0
    live: dict[int, LiveGroup] = field(default_factory=dict[int, LiveGroup])
    """Groups that have not ended, by id, in the order of their last dispatch."""
    ended: set[int] | None = None
    """Ids of the groups that ended, in a fork whose first checkpoint has been removed: any other id may be of a group in it. None
    where every group is known."""
    dispatched: int = 0
    """Number of groups that were dispatched, retries not counted."""
    tried_again: int = 0
    """Number of further dispatches of these groups."""
    batched: int = 0
    """Number of groups in batches."""
    filtered: Counter[str] = field(default_factory=Counter[str])
    """Number of filtered groups by reason."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Number of dropped groups by the reason up to its colon."""

    def copy(self) -> "GroupState":
        """Return a state that changes independently of this one."""
        ended = None if self.ended is None else set(self.ended)
        filtered, dropped = Counter(self.filtered), Counter(self.dropped)
        return replace(self, live=dict(self.live), ended=ended, filtered=filtered, dropped=dropped)

    @property
    def pending(self) -> PendingGroups:
        """The groups that have not ended."""
        ready = frozenset(group_id for group_id, group in self.live.items() if group.is_finished)
        return PendingGroups(next_group_id=self.next_group_id, ready=ready, in_flight=frozenset(self.live) - ready)


class GroupHistory:
    """Holds the state of every group that has not ended."""

    def __init__(
        self, ledger: Ledger, *, max_off_policy_steps: int, remembered: Collection[int], with_rollouts: Collection[int] = ()
    ) -> None:
        """Start with no groups.

        Args:
            remembered: steps whose state must be kept, for a start from them or for `pending_after`.
            with_rollouts: steps whose rollouts are on disk: the groups of their batches are kept in `formed`.
        """
        self._require = ledger.require
        self._max_off_policy_steps = max_off_policy_steps
        self._remembered = frozenset(remembered)
        self._with_rollouts = frozenset(with_rollouts)
        self.state = GroupState()
        self._states: dict[int, GroupState] = {}
        """The state after the batch of each remembered step."""
        self.untrained: dict[int, list[int]] = {}
        """Ids of the groups of each batch that was formed and not trained yet, by step."""
        self.formed: dict[int, dict[int, LiveGroup]] = {}
        """The groups of each batch as they were when it was formed, by step, for steps with rollouts."""
        self.rollouts: dict[int, RolloutsWritten] = {}
        """The event of each step's files, by step."""
        self._newest_dispatch = PolicyVersion(0)
        """Version of the last dispatch since the orchestrator started."""
        self.num_since_start = 0
        """Number of events of groups and batches since the orchestrator started."""
        self.voided = 0
        """Number of dispatched groups that resumes voided."""
        self.is_replay = False
        """True when the orchestrator replays rollouts: their versions are of another run's policies, and may have any age."""

    def pending_after(self, step: int) -> PendingGroups | None:
        """Return the groups that were live after batch `step` was formed; None when they are not known."""
        state = self._states.get(step)
        return state.pending if state is not None and state.ended is None else None

    def adopt(self, step: Step, pending: PendingGroups | None) -> None:
        """Start from another run's checkpoint of `step`.

        Args:
            pending: the groups in the checkpoint. None when it has been removed: then any unknown group may be one of its groups.
        """
        self.state = self._states[step] = GroupState(step=step, ended=set())
        if pending is not None:
            self.state.next_group_id, self.state.ended = pending.next_group_id, None
            self.state.live = dict.fromkeys(sorted(pending.in_flight), LiveGroup(must_restart=True))
            self.state.live |= dict.fromkeys(sorted(pending.ready), LiveGroup(is_finished=True))

    def start(self, from_step: Step, *, is_replay: bool = False) -> None:
        """Go back to batch `from_step`: later events are void, and groups that were in flight then must be dispatched again.

        Args:
            is_replay: the groups that follow come from another run's record.
        """
        self.is_replay = is_replay
        dispatched, state = self.state.dispatched, self._states.get(from_step)
        if state is None:
            self._require(
                from_step == 0, _ONCE, f"starts from step {from_step}, but the history has no batch {from_step} to go back to"
            )
            state = GroupState(step=from_step)
        self.state = state.copy()
        for group_id, group in state.live.items():
            if not group.is_finished:
                self.state.live[group_id] = msgspec.structs.replace(group, must_restart=True)
        self.voided += dispatched - self.state.dispatched
        for table in (self._states, self.untrained, self.formed, self.rollouts):
            for step in [step for step in table if step > from_step]:
                del table[step]
        self._newest_dispatch = PolicyVersion(0)
        self.num_since_start = 0

    def dispatch(self, event: Dispatch) -> None:
        """Check a dispatch of a group: its first, or a further one after a lost attempt at the group or a resume."""
        self.num_since_start += 1
        self._require(
            event.version >= self._newest_dispatch or self.is_replay,
            _VERSIONS,
            "a group is dispatched at an older policy than the one before it",
        )
        self._newest_dispatch = event.version
        state, group_id = self.state, event.group_id
        group = state.live.pop(group_id, None)
        if group is None:
            if state.ended is None or group_id in state.ended:
                is_new = group_id >= state.next_group_id
                self._require(is_new, _ONCE, f"group {group_id} is dispatched again after its end")
                self._require(
                    not is_new or group_id == state.next_group_id,
                    _ONCE,
                    f"group {group_id} is dispatched, but {state.next_group_id} is the next: ids were left out",
                )
            state.next_group_id = max(state.next_group_id, group_id + 1)
            state.dispatched += 1
        else:
            self._require(not group.is_finished, _ONCE, f"group {group_id} is dispatched again after it finished")
            known, repeated = (group.env, group.example_id), (event.env, event.example_id)
            self._require(
                known == repeated or group.must_restart,  # before a resume the data set may have changed, and with it the index
                _ONCE,
                f"group {group_id} is dispatched as example {repeated} and was example {known}",
            )
            state.tried_again += 1
        # Appended at the end, so `live` is in the order of dispatches. `batch` checks the first entry.
        state.live[group_id] = LiveGroup(env=event.env, example_id=event.example_id, version=event.version)

    def finish(self, event: Finish, *, newest_published: PolicyVersion) -> None:
        """Check that the group was in flight, and the versions of its tokens."""
        name, group = f"group {event.group_id}", self._find(event.group_id, "finishes")
        if group is None:
            return
        self.num_since_start += 1
        self._require(not group.is_finished, _ONCE, f"{name} finishes twice")
        self._require(not group.must_restart, _ONCE, f"{name} finishes without being dispatched again after the resume")
        if event.newest_version != _NO_TOKENS:
            self._require(
                group.version <= event.oldest_version <= event.newest_version
                and (event.newest_version <= newest_published or self.is_replay),
                _VERSIONS,
                f"{name} holds tokens of policies {event.oldest_version} to {event.newest_version}; it was dispatched at "
                f"policy {group.version} and the newest published is {newest_published}",
            )
        self.state.live[event.group_id] = msgspec.structs.replace(
            group,
            must_restart=False,
            is_finished=True,
            oldest=event.oldest_version,
            newest=event.newest_version,
            reward_mean=event.reward_mean,
        )

    def filter(self, event: Filter) -> None:
        """Check that the group finished, and end it: it carries no signal."""
        group = self._find(event.group_id, "is filtered")
        if group is not None:
            self._require(group.is_finished, _ONCE, f"group {event.group_id} is filtered before it finished")
            self._require(bool(event.reason), _ONCE, f"group {event.group_id} is filtered without a reason")
            self.state.filtered[event.reason] += 1
            self._end(event.group_id)

    def drop(self, event: Drop) -> None:
        """End a group that failed or is stale."""
        if self._find(event.group_id, "is dropped") is not None:
            self._require(bool(event.reason), _ONCE, f"group {event.group_id} is dropped without a reason")
            self.state.dropped[event.reason.partition(":")[0]] += 1
            self._end(event.group_id)

    def batch(self, event: BatchFormed) -> None:
        """End the groups of the batch, check their versions, and keep the state if its step is remembered."""
        state, step, name = self.state, event.step, f"batch {event.step}"
        self._require(step == state.step + 1, _ONCE, f"{name} is formed, but {state.step + 1} is the next")
        self.num_since_start += 1
        found: dict[int, LiveGroup] = {}
        for group_id in event.group_ids:
            if (group := self._find(group_id, f"enters {name}")) is not None:
                self._require(group.is_finished, _ONCE, f"group {group_id} enters {name} before it finished")
                found[group_id] = group
                self._end(group_id)
        if step in self._with_rollouts:
            self.formed[step] = found
        allowed = max(step - 1 - self._max_off_policy_steps, 0)
        self._require(
            self.is_replay or allowed <= event.oldest_version <= event.newest_version <= step - 1,
            _VERSIONS,
            f"{name} holds tokens of policies {event.oldest_version} to {event.newest_version}; "
            f"max_off_policy_steps {self._max_off_policy_steps} allows {allowed} to {step - 1}",
        )
        groups = found.values()
        if groups and all(group.env for group in groups):
            recorded = (event.oldest_version, event.newest_version)
            known = (min(group.oldest for group in groups), max(group.newest for group in groups))
            self._require(recorded == known, _VERSIONS, f"{name} says policies {recorded}, its groups finished with {known}")
        self._require(bool(event.group_ids), _ONCE, f"{name} is empty")
        state.step = step
        state.batched += len(found)
        self.untrained[step] = list(event.group_ids)
        # The group dispatched longest ago must not be stale. It is allowed one step more, because the dispatcher cancels
        # stale groups only after the batch was formed.
        dispatched = (live for live in state.live.items() if live[1].env and not live[1].must_restart)
        if not self.is_replay and (first := next(dispatched, None)) is not None:
            group_id, group = first
            oldest = group.oldest if group.is_finished else group.version
            self._require(
                not is_stale(step=Step(step - 1), oldest=oldest, max_off_policy_steps=self._max_off_policy_steps),
                _ONCE,
                f"group {group_id}, begun at policy {oldest}, was neither trained nor filtered nor dropped when "
                f"{name} was formed: it vanished",
            )
        if step in self._remembered:
            self._states[step] = state.copy()

    def rollouts_written(self, event: RolloutsWritten) -> None:
        """Keep the digest of a step's files, and check that they were written once, right after its batch was formed."""
        step = self.state.step
        self._require(
            event.step == step and event.step not in self.rollouts,
            _ONCE,
            f"the rollouts of step {event.step} are written after batch {step} was formed"
            + (", again" if event.step in self.rollouts else ""),
        )
        self.rollouts[event.step] = event

    def _find(self, group_id: int, happens: str) -> LiveGroup | None:
        """Return a live group. If there is none, record a breach and return None; `happens` is the verb in its text."""
        state = self.state
        group = state.live.get(group_id)
        if group is None and state.ended is not None and group_id not in state.ended:
            group = state.live[group_id] = LiveGroup(is_finished=True)  # a group that another run finished
        before = "it ended before" if group_id < state.next_group_id else "it was never dispatched"
        self._require(group is not None, _ONCE, f"group {group_id} {happens}, but {before}")
        return group

    def _end(self, group_id: int) -> None:
        del self.state.live[group_id]
        if self.state.ended is not None:
            self.state.ended.add(group_id)
