"""Checks invariant 1, and what batches say of versions: follows every group from dispatch to its one end.

Fed with the orchestrator's events. Holds the groups that live (in flight or ready) and, for each step that some attempt
resumes from or that is committed, those that lived when its batch was formed: memory does not grow with the run's length.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from trivet.algorithms.staleness import is_stale
from trivet.checkpoints.orchestrator_part import OwedGroups
from trivet.history.breaches import Invariant, Ledger
from trivet.wire.events import BatchFormed, Dispatch, Drop, Filter, Finish, RolloutsWritten
from trivet.wire.versions import PolicyVersion, Step

_ONCE, _VERSIONS = Invariant.EXACTLY_ONCE, Invariant.VERSIONS_TELL_THE_TRUTH
_NO_TOKENS = PolicyVersion(-1)
"""Versions of a finished group in which nothing was sampled."""


class LiveGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A million of them are made for a long run; a msgspec struct is made ten times as fast as a frozen dataclass."""

    env: str
    example_id: int
    version: PolicyVersion
    """Policy version of its last dispatch."""
    is_owed: bool = False
    """The group was in flight in the checkpoint that the run went back to, and was not dispatched again yet."""
    is_finished: bool = False
    oldest: PolicyVersion = _NO_TOKENS
    newest: PolicyVersion = _NO_TOKENS
    reward_mean: float = 0.0
    """Mean reward, from the group's finish."""


_READY_ELSEWHERE = LiveGroup(env="", example_id=-1, version=PolicyVersion(0), is_finished=True)
"""A group that another run finished."""


@dataclass(slots=True, kw_only=True)
class GroupCounts:
    """Counts the groups that stand: work undone by a resume is excluded."""

    dispatched: int = 0
    """Groups, not tries."""
    tried_again: int = 0
    batched: int = 0
    filtered: Counter[str] = field(default_factory=Counter[str])
    """Number by reason."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Number by the reason up to its colon."""

    def copy(self) -> "GroupCounts":
        """Return counts that change independently of these."""
        return replace(self, filtered=Counter(self.filtered), dropped=Counter(self.dropped))


@dataclass(slots=True, kw_only=True)
class _State:
    step: int = 0
    """The last batch formed."""
    next_group_id: int = 0
    live: dict[int, LiveGroup] = field(default_factory=dict[int, LiveGroup])
    counts: GroupCounts = field(default_factory=GroupCounts)
    ended: set[int] | None = None
    """Groups that ended here, if it is not known which groups another run's checkpoint handed on; else None."""

    def copy(self) -> "_State":
        return _State(
            step=self.step,
            next_group_id=self.next_group_id,
            live=dict(self.live),
            counts=self.counts.copy(),
            ended=None if self.ended is None else set(self.ended),
        )

    @property
    def owed(self) -> OwedGroups:
        ready = frozenset(group_id for group_id, group in self.live.items() if group.is_finished)
        return OwedGroups(next_group_id=self.next_group_id, ready=ready, in_flight=frozenset(self.live) - ready)


class GroupHistory:
    """Holds the state of every group that has not ended."""

    def __init__(
        self, ledger: Ledger, *, max_off_policy_steps: int, remembered: Collection[int], with_rollouts: Collection[int] = ()
    ) -> None:
        """Start with no groups.

        Args:
            remembered: steps whose state will be asked for: by a start from them, or by `owed_after`.
            with_rollouts: steps whose groups will be asked for, by `formed`.
        """
        self._require = ledger.require
        self._max_off_policy_steps = max_off_policy_steps
        self._remembered = frozenset(remembered)
        self._state = _State()
        self._states: dict[int, _State] = {}
        self._with_rollouts = frozenset(with_rollouts)
        self._formed: dict[int, list[int]] = {}
        """Batches that were not trained yet."""
        self.formed: dict[int, dict[int, LiveGroup]] = {}
        """The groups of each batch as they were when it was formed, by step, for steps with rollouts."""
        self.rollouts: dict[int, RolloutsWritten] = {}
        """The event of each step's files, by step."""
        self._newest_dispatch = PolicyVersion(0)
        """Version of the last dispatch since the orchestrator started."""
        self.num_since_start = 0
        """Events of groups and batches since the orchestrator started."""
        self.voided = 0
        """Dispatches that resumes took back."""
        self.is_replay = False
        """The orchestrator replays rollouts: their versions are of another run's policies, and may have any age."""

    @property
    def counts(self) -> GroupCounts:
        """Counts of the groups that stand."""
        return self._state.counts

    @property
    def last_batch(self) -> int:
        """Step of the last batch formed."""
        return self._state.step

    @property
    def live(self) -> OwedGroups:
        """The groups that have not ended."""
        return self._state.owed

    def owed_after(self, step: int) -> OwedGroups | None:
        """Return the groups that lived when batch `step` was formed. None: it was not formed, or is not remembered."""
        state = self._states.get(step)
        return state.owed if state is not None and state.ended is None else None

    def take_batch(self, step: Step) -> list[int] | None:
        """The groups of batch `step`, once, for the trainer's side to compare."""
        return self._formed.pop(step, None)

    def adopt(self, step: Step, owed: OwedGroups | None) -> None:
        """Start from another run's checkpoint of `step`, whose groups this history does not know.

        Args:
            owed: None when the checkpoint has been removed: any group that was not seen before may be one of it.
        """
        if owed is None:
            self._state = self._states[step] = _State(step=step, ended=set())
            return
        in_flight = LiveGroup(env="", example_id=-1, version=PolicyVersion(0), is_owed=True)
        live = dict.fromkeys(sorted(owed.in_flight), in_flight) | dict.fromkeys(sorted(owed.ready), _READY_ELSEWHERE)
        self._state = self._states[step] = _State(step=step, next_group_id=owed.next_group_id, live=live)

    def start(self, from_step: Step, *, is_replay: bool = False) -> None:
        """Go back to batch `from_step`: later events are void, and groups in flight then are owed another dispatch.

        Args:
            is_replay: groups come from another run's record.
        """
        self.is_replay = is_replay
        dispatched = self._state.counts.dispatched
        state = self._states.get(from_step)
        if state is None:
            self._require(
                from_step == 0, _ONCE, f"starts from step {from_step}, but the history has no batch {from_step} to go back to"
            )
            state = _State(step=from_step)
        self._state = state.copy()
        self._state.live = {
            group_id: group
            if group.is_finished
            else LiveGroup(env=group.env, example_id=group.example_id, version=group.version, is_owed=True)
            for group_id, group in state.live.items()
        }
        self.voided += dispatched - self._state.counts.dispatched
        self._states = {step: kept for step, kept in self._states.items() if step <= from_step}
        self._formed = {step: ids for step, ids in self._formed.items() if step <= from_step}
        self.formed = {step: groups for step, groups in self.formed.items() if step <= from_step}
        self.rollouts = {step: event for step, event in self.rollouts.items() if step <= from_step}
        self._newest_dispatch = PolicyVersion(0)
        self.num_since_start = 0

    def dispatch(self, event: Dispatch) -> None:
        """Check a group's first dispatch, or another after a lost try or a resume."""
        self.num_since_start += 1
        self._require(
            event.version >= self._newest_dispatch or self.is_replay,
            _VERSIONS,
            "a group is dispatched at an older policy than the one before it",
        )
        self._newest_dispatch = event.version
        state, group = self._state, self._state.live.get(event.group_id)
        if group is None and state.ended is not None and event.group_id not in state.ended:
            state.next_group_id = max(state.next_group_id, event.group_id + 1)
            state.counts.dispatched += 1
        elif group is None:
            is_new = event.group_id >= state.next_group_id
            self._require(is_new, _ONCE, f"group {event.group_id} is dispatched again after its end")
            self._require(
                not is_new or event.group_id == state.next_group_id,
                _ONCE,
                f"group {event.group_id} is dispatched, but {state.next_group_id} is the next: ids were left out",
            )
            state.next_group_id = max(state.next_group_id, event.group_id + 1)
            state.counts.dispatched += 1
        else:
            self._require(not group.is_finished, _ONCE, f"group {event.group_id} is dispatched again after it finished")
            known, repeated = (group.env, group.example_id), (event.env, event.example_id)
            self._require(
                known == repeated or group.is_owed,  # a data set may have changed before a resume: rows move
                _ONCE,
                f"group {event.group_id} is dispatched as example {repeated} and was example {known}",
            )
            state.counts.tried_again += 1
            del state.live[event.group_id]
        state.live[event.group_id] = LiveGroup(env=event.env, example_id=event.example_id, version=event.version)

    def finish(self, event: Finish, *, newest_published: PolicyVersion) -> None:
        """Check that the group was in flight, and the versions of its tokens."""
        name, group = f"group {event.group_id}", self._find(event.group_id, "finishes")
        if group is None:
            return
        self.num_since_start += 1
        self._require(not group.is_finished, _ONCE, f"{name} finishes twice")
        self._require(not group.is_owed, _ONCE, f"{name} finishes without being dispatched again after the resume")
        if event.newest_version != _NO_TOKENS:
            self._require(
                group.version <= event.oldest_version <= event.newest_version
                and (event.newest_version <= newest_published or self.is_replay),
                _VERSIONS,
                f"{name} holds tokens of policies {event.oldest_version} to {event.newest_version}; it was dispatched at "
                f"policy {group.version} and the newest published is {newest_published}",
            )
        self._state.live[event.group_id] = LiveGroup(
            env=group.env,
            example_id=group.example_id,
            version=group.version,
            is_finished=True,
            oldest=event.oldest_version,
            newest=event.newest_version,
            reward_mean=event.reward_mean,
        )

    def filter(self, event: Filter) -> None:
        """End a finished group that carries no signal."""
        group = self._find(event.group_id, "is filtered")
        if group is None:
            return
        self._require(group.is_finished, _ONCE, f"group {event.group_id} is filtered before it finished")
        self._require(bool(event.reason), _ONCE, f"group {event.group_id} is filtered without a reason")
        self._state.counts.filtered[event.reason] += 1
        self._end(event.group_id)

    def drop(self, event: Drop) -> None:
        """End a group that failed or is stale."""
        if self._find(event.group_id, "is dropped") is None:
            return
        self._require(bool(event.reason), _ONCE, f"group {event.group_id} is dropped without a reason")
        self._state.counts.dropped[event.reason.partition(":")[0]] += 1
        self._end(event.group_id)

    def batch(self, event: BatchFormed) -> None:
        """End the batch's groups, and remember those that live on."""
        state, name = self._state, f"batch {event.step}"
        self._require(event.step == state.step + 1, _ONCE, f"{name} is formed, but {state.step + 1} is the next")
        self.num_since_start += 1
        found: dict[int, LiveGroup] = {
            group_id: group for group_id in event.group_ids if (group := self._leave_for_batch(group_id, event.step))
        }
        groups = list(found.values())
        if event.step in self._with_rollouts:
            self.formed[event.step] = found
        self._check_versions(event, groups)
        self._require(bool(event.group_ids), _ONCE, f"{name} is empty")
        state.step = event.step
        state.counts.batched += len(groups)
        self._formed[event.step] = list(event.group_ids)
        self._check_age(event.step)
        if event.step in self._remembered:
            self._states[event.step] = state.copy()

    def rollouts_written(self, event: RolloutsWritten) -> None:
        """Keep the digest of a step's files, written once and right after its batch."""
        step = self._state.step
        self._require(
            event.step == step and event.step not in self.rollouts,
            _ONCE,
            f"the rollouts of step {event.step} are written after batch {step} was formed"
            + (", again" if event.step in self.rollouts else ""),
        )
        self.rollouts[event.step] = event

    def _find(self, group_id: int, happens: str) -> LiveGroup | None:
        group = self._state.live.get(group_id)
        if group is None and self._state.ended is not None and group_id not in self._state.ended:
            group = self._state.live[group_id] = _READY_ELSEWHERE
        before = "it ended before" if group_id < self._state.next_group_id else "it was never dispatched"
        self._require(group is not None, _ONCE, f"group {group_id} {happens}, but {before}")
        return group

    def _leave_for_batch(self, group_id: int, step: Step) -> LiveGroup | None:
        group = self._find(group_id, f"enters batch {step}")
        if group is not None:
            self._require(group.is_finished, _ONCE, f"group {group_id} enters batch {step} before it finished")
            self._end(group_id)
        return group

    def _end(self, group_id: int) -> None:
        del self._state.live[group_id]
        if self._state.ended is not None:
            self._state.ended.add(group_id)

    def _check_versions(self, event: BatchFormed, groups: Sequence[LiveGroup]) -> None:
        allowed = max(event.step - 1 - self._max_off_policy_steps, 0)
        self._require(
            self.is_replay or allowed <= event.oldest_version <= event.newest_version <= event.step - 1,
            _VERSIONS,
            f"batch {event.step} holds tokens of policies {event.oldest_version} to {event.newest_version}; "
            f"max_off_policy_steps {self._max_off_policy_steps} allows {allowed} to {event.step - 1}",
        )
        if groups and all(group.env for group in groups):
            recorded = (event.oldest_version, event.newest_version)
            known = (min(group.oldest for group in groups), max(group.newest for group in groups))
            self._require(
                recorded == known, _VERSIONS, f"batch {event.step} says policies {recorded}, its groups finished with {known}"
            )

    def _check_age(self, step: Step) -> None:
        """Require that the group dispatched longest ago is not stale.

        One step of grace, because groups in flight are looked at between batches.
        """
        if self.is_replay:
            return
        for group_id, group in self._state.live.items():
            if not group.is_owed and group.env:
                oldest = group.oldest if group.is_finished else group.version
                self._require(
                    not is_stale(step=Step(step - 1), oldest=oldest, max_off_policy_steps=self._max_off_policy_steps),
                    _ONCE,
                    f"group {group_id}, begun at policy {oldest}, was neither trained nor filtered nor dropped when "
                    f"batch {step} was formed: it vanished",
                )
                return
