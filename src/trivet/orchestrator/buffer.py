"""What becomes of every group between dispatch and batch. The one owner of that state; each transition writes its event.

States of a group: in flight -> ready -> in a batch, or out: filtered (finished, carries no signal), dropped (failed, stale).
`snapshot` is the orchestrator's half of a checkpoint: what would otherwise be lost.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from trivet.algorithms.filters import filter_reason
from trivet.algorithms.staleness import is_stale
from trivet.orchestrator.sampler import Draw
from trivet.wire.events import BatchFormed, Dispatch, Drop, Event, Filter, Finish
from trivet.wire.rollouts import Group, GroupId
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


class BufferState(msgspec.Struct, kw_only=True):
    ready: list[Group] = []
    """Finished, waiting for a batch, oldest first."""
    in_flight: list[GroupId] = []
    """Dispatched and not finished: a resumed run dispatches them again, first."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What happened since the last batch."""

    finished: int = 0
    filtered: int = 0
    filtered_solve_all: int = 0
    failed: int = 0
    stale: int = 0


class GroupBuffer:
    """
    >>> buffer.dispatched(draw, version=version)
    >>> buffer.finished(group)
    >>> groups = buffer.take_batch(step, num_groups=8)  # None while there are not enough
    """

    def __init__(
        self,
        *,
        write_event: Callable[[Event], None],
        online_difficulty_filtering: bool,
        max_off_policy_steps: int,
        ready: Sequence[Group] = (),
    ) -> None:
        self._write_event = write_event
        self._is_filtering = online_difficulty_filtering
        self._max_off_policy_steps = max_off_policy_steps
        self._ready = list(ready)
        self._in_flight: dict[GroupId, PolicyVersion] = {}
        self.tally = Tally()
        self.fruitless_in_a_row = 0
        """Groups that failed or carried no signal since the last one that can be trained on."""
        self.last_failure = ""

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def dispatched(self, draw: Draw, *, version: PolicyVersion) -> None:
        self._in_flight[draw.group_id] = version
        self._write_event(Dispatch(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, version=version))

    def finished(self, group: Group) -> None:
        """Advantages are set; the group becomes ready or is filtered."""
        del self._in_flight[group.group_id]
        self.tally.finished += 1
        rewards = group.rewards
        num_loss_tokens = sum(sample.num_loss_tokens for rollout in group.rollouts for sample in rollout.samples)
        oldest, newest = (group.oldest_version, group.newest_version) if num_loss_tokens else (-1, -1)
        self._write_event(
            Finish(
                group_id=group.group_id,
                reward_mean=float(rewards.mean()),
                oldest_version=PolicyVersion(oldest),
                newest_version=PolicyVersion(newest),
            )
        )
        reason = filter_reason(rewards, num_loss_tokens=num_loss_tokens, online_difficulty_filtering=self._is_filtering)
        if reason is None:
            self._ready.append(group)
            self.fruitless_in_a_row = 0
            return
        self.tally.filtered += 1
        self.tally.filtered_solve_all += int(rewards.min() > 0)
        self._fruitless(f"group {group.group_id} was filtered ({reason}): every reward is {rewards[0]:g}")
        self._write_event(Filter(group_id=group.group_id, reason=reason))

    def failed(self, group_id: GroupId, error: str) -> None:
        del self._in_flight[group_id]
        self.tally.failed += 1
        self._fruitless(f"group {group_id} failed: {error}")
        self._write_event(Drop(group_id=group_id, reason=f"failed: {error[:500]}"))

    def cancelled(self, group_id: GroupId, reason: str) -> None:
        del self._in_flight[group_id]
        self._write_event(Drop(group_id=group_id, reason=reason))

    def stale_in_flight(self, step: Step) -> list[GroupId]:
        """Groups whose first tokens are already too old for the batch being filled."""
        return [
            group_id
            for group_id, version in self._in_flight.items()
            if is_stale(step=step, oldest=version, max_off_policy_steps=self._max_off_policy_steps)
        ]

    def take_batch(self, step: Step, *, num_groups: int) -> list[Group] | None:
        """The oldest `num_groups` ready groups for batch `step`, None while there are fewer; stale ones are dropped first."""
        self._drop_stale(step)
        if len(self._ready) < num_groups:
            return None
        groups, self._ready = self._ready[:num_groups], self._ready[num_groups:]
        self._write_event(
            BatchFormed(
                step=step,
                group_ids=[group.group_id for group in groups],
                oldest_version=min(group.oldest_version for group in groups),
                newest_version=max(group.newest_version for group in groups),
            )
        )
        return groups

    def snapshot(self, *, also_in_flight: Sequence[GroupId] = ()) -> BufferState:
        """
        Args:
            also_in_flight: groups of an earlier checkpoint that were not started again yet.
        """
        return BufferState(ready=list(self._ready), in_flight=sorted({*self._in_flight, *also_in_flight}))

    def _drop_stale(self, step: Step) -> None:
        kept: list[Group] = []
        for group in self._ready:
            if is_stale(step=step, oldest=group.oldest_version, max_off_policy_steps=self._max_off_policy_steps):
                self.tally.stale += 1
                self._write_event(Drop(group_id=group.group_id, reason="stale"))
            else:
                kept.append(group)
        self._ready = kept

    def _fruitless(self, what: str) -> None:
        self.fruitless_in_a_row += 1
        self.last_failure = what
        logger.debug(what)
