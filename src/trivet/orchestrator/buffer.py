"""Owns the state of every group between dispatch and batch. Each change of a state is written as an event.

The states of a group: in flight -> ready -> in a batch. A group leaves instead when it is filtered (finished, without signal) or
dropped (failed or stale). `snapshot` returns the groups that a checkpoint keeps: those in flight and those ready.

A batch of two groups, at most one step off-policy (in flight / ready):

1. `dispatched` groups 0, 1, 2, 3 from policy 0                  4 / 0
2. `finished` group 1: rewards 0, 1                              3 / 1
3. `finished` group 0: rewards 1, 1, no signal -> filtered       2 / 1
4. `take_batch(1)` -> None, fewer than two are ready             2 / 1
5. `finished` group 2; `take_batch(1)` -> groups 1, 2            1 / 0
6. `snapshot` for the checkpoint of batch 1: group 3 in flight   1 / 0
7. `dispatched` groups 4, 5, 6 from policy 1                     4 / 0
8. `stale_in_flight(3)` -> group 3 (policy 0 is 2 steps behind); the dispatcher cancels it: `cancelled`   3 / 0
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from trivet.algorithms.arithmetic import rounding_error
from trivet.algorithms.dispatching import is_stale
from trivet.config.schema.orchestrator import FiltersConfig
from trivet.orchestrator.filters import FilterReason, RolloutFilter, filter_reason, is_flat, mask_rollouts
from trivet.orchestrator.prompts import MAX_NAMED, PromptLimits
from trivet.orchestrator.sampler import Draw
from trivet.wire.events import BatchFormed, Dispatch, Drop, Event, Filter, Finish
from trivet.wire.rollouts import Group
from trivet.wire.versions import GroupId, PolicyVersion, Step

logger = logging.getLogger(__name__)


class BufferState(msgspec.Struct, kw_only=True):
    """The groups of a checkpoint that are not in a batch yet."""

    ready: list[Group] = []
    """Finished, waiting for a batch, oldest first."""
    in_flight: list[Draw] = []
    """Dispatched and not finished: a resumed run dispatches them again, first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """The properties of a group that metrics need, without its tokens."""

    env: str
    example_id: int
    rewards: np.ndarray
    """float64 [G]."""
    is_flat: bool
    """True if all rewards are equal, and the advantages too."""
    matches: Sequence[RolloutFilter]
    """The filter that matched, for each rollout in which one did."""
    filtered: FilterReason | None
    """The reason why it is not trained on; None when it is."""

    @classmethod
    def of(
        cls, group: Group, *, matches: Sequence[RolloutFilter] = (), filtered: FilterReason | None = None
    ) -> "FinishedGroup":
        """Return the properties of `group`; `matches` is what `mask_rollouts` returned for it."""
        return cls(
            env=group.env,
            example_id=group.example_id,
            rewards=group.rewards,
            is_flat=is_flat(group),
            matches=tuple(matches),
            filtered=filtered,
        )

    @property
    def is_solved(self) -> bool:
        """True if all rewards are above 0."""
        return bool(self.rewards.min() > rounding_error(self.rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGroup:
    """A group that failed or was dropped."""

    env: str
    reason: str
    """The error type of a failed group, or the reason why the group was dropped."""
    is_infrastructure: bool = False
    """True when a server, a worker or the network caused the failure, and not the policy."""


@dataclass(slots=True)
class GroupCounters:
    """The groups that ended since the last batch. When a batch is formed, the loop takes the counters and sets empty ones."""

    finished: list[FinishedGroup] = field(default_factory=list[FinishedGroup])
    failed: list[LostGroup] = field(default_factory=list[LostGroup])
    dropped: list[LostGroup] = field(default_factory=list[LostGroup])

    def report_overlong(self, *, step: Step) -> None:
        """Log a warning that names the examples whose prompts did not fit, if there are any."""
        overlong = [group for group in self.finished if group.filtered is FilterReason.OVERLONG_PROMPT]
        if overlong:
            examples = sorted({(group.env, group.example_id) for group in overlong})
            named = [f"{example} of {env}" for env, example in examples[:MAX_NAMED]] + ["..."] * (len(examples) > MAX_NAMED)
            logger.warning(
                "prompts that do not fit step=%s groups=%s of %s examples=%s",
                *(step, len(overlong), len(self.finished), ", ".join(named)),
            )


class GroupBuffer:
    """Keeps groups from dispatch to batch."""

    def __init__(
        self,
        *,
        write_event: Callable[[Event], None],
        online_difficulty_filtering: bool,
        max_off_policy_steps: int,
        filters: FiltersConfig | None = None,
        masks_truncated: bool = False,
        prompt_limits: PromptLimits | None = None,
        ready: Sequence[Group] = (),
    ) -> None:
        self._write_event = write_event
        self._is_filtering = online_difficulty_filtering
        self._max_off_policy_steps = max_off_policy_steps
        self._filters = filters or FiltersConfig()
        self._masks_truncated = masks_truncated
        self.prompt_limits = prompt_limits
        """The limits of prompt lengths. The server's context is part of them once `check_prompts` has read it."""
        self._ready = list(ready)
        self._in_flight: dict[GroupId, tuple[Draw, PolicyVersion]] = {}
        """The draw of each group in flight, and the policy that was served when its current attempt started."""
        self.counters = GroupCounters()
        self.fruitless_in_a_row = 0
        """Groups that failed or carried no signal since the last one that can be trained on."""
        self._first_failure = self._first_filtered = ""

    @property
    def num_ready(self) -> int:
        """Finished groups that wait for a batch."""
        return len(self._ready)

    @property
    def num_in_flight(self) -> int:
        """Groups that were dispatched and have not ended, retries included."""
        return len(self._in_flight)

    @property
    def first_failure(self) -> str:
        """Describe the first group that failed among the fruitless groups in a row; if none failed, the first filtered one."""
        return self._first_failure or self._first_filtered

    def dispatched(self, draw: Draw, *, version: PolicyVersion, server: str = "") -> None:
        """Record that a group starts, or that it is retried because its last attempt was lost."""
        self._in_flight[draw.group_id] = (draw, version)
        self._write_event(
            Dispatch(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, version=version, server=server)
        )

    def finished(self, group: Group) -> None:
        """Filter a finished group whose advantages are set, or make it ready."""
        del self._in_flight[group.group_id]
        rewards = group.rewards
        num_sampled = sum(sample.num_loss_tokens for rollout in group.rollouts for sample in rollout.samples)
        # -1 where no token was sampled, so that no policy can be named
        oldest, newest = (group.oldest_version, group.newest_version) if num_sampled else (-1, -1)
        self._write_event(
            Finish(
                group_id=group.group_id,
                reward_mean=float(rewards.mean()),
                oldest_version=PolicyVersion(oldest),
                newest_version=PolicyVersion(newest),
                completion_tokens=num_sampled / len(group.rollouts),
            )
        )
        matches = mask_rollouts(group, self._filters, masks_truncated=self._masks_truncated)
        limits = self.prompt_limits
        reason = filter_reason(
            group,
            num_sampled=num_sampled,
            online_difficulty_filtering=self._is_filtering,
            seq_len=None if limits is None else limits.seq_len,
        )
        self.counters.finished.append(FinishedGroup.of(group, matches=matches, filtered=reason))
        if reason is None:
            self._ready.append(group)
            self.fruitless_in_a_row = 0
            self._first_failure = self._first_filtered = ""
            return
        low, high = f"{rewards.min():g}", f"{rewards.max():g}"
        cause = f"its rewards are {f'all {low}' if low == high else f'{low} to {high}'}"
        if reason is FilterReason.OVERLONG_PROMPT and limits is not None:
            cause = f"the prompt of example {group.example_id} does not fit, and {limits.explain(group.env)}"
        message = f"group {group.group_id} of {group.env} was filtered ({reason}): {cause}"
        self._first_filtered = self._first_filtered or message
        self.fruitless_in_a_row += 1
        logger.debug(message)
        self._write_event(Filter(group_id=group.group_id, reason=reason))

    def failed(self, group_id: GroupId, error: str, *, kind: str, is_infrastructure: bool = False) -> None:
        """Drop a group that ended with an error.

        Args:
            error: `ErrorType: message`.
            kind: error type under which the metrics count the failure; it may be the cause of the error in `error`.
            is_infrastructure: see `LostGroup`.
        """
        draw, _ = self._in_flight.pop(group_id)
        self.counters.failed.append(LostGroup(env=draw.env, reason=kind, is_infrastructure=is_infrastructure))
        message = f"group {group_id} of {draw.env} failed: {error}"
        self._first_failure = self._first_failure or message
        self.fruitless_in_a_row += 1
        logger.debug(message)
        self._write_event(Drop(group_id=group_id, reason=f"failed: {error[:500]}"))

    def cancelled(self, group_id: GroupId, reason: str) -> None:
        """Drop a group that was cancelled for `reason`."""
        self._drop(self._in_flight.pop(group_id)[0], reason)

    def drop_without_example(self, draws: Sequence[Draw]) -> None:
        """Drop groups of a checkpoint whose examples are no longer in the data sets."""
        for draw in draws:
            self._drop(draw, "example_gone")

    def stale_in_flight(self, step: Step) -> list[GroupId]:
        """Return the groups in flight that are stale: they started from a policy that is too old for batch `step`."""
        return [group_id for group_id, (_, version) in self._in_flight.items() if self._is_stale(step, version)]

    def take_batch(self, step: Step, *, num_groups: int) -> list[Group] | None:
        """Drop stale groups, and return the oldest `num_groups` ready ones for batch `step`; None while there are fewer."""
        ready, self._ready = self._ready, list[Group]()
        for group in ready:
            if self._is_stale(step, group.oldest_version):
                self._drop(group, "stale")
            else:
                self._ready.append(group)
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

    def snapshot(self, *, also_in_flight: Sequence[Draw] = ()) -> BufferState:
        """Return the groups that a checkpoint keeps.

        Args:
            also_in_flight: groups of an earlier checkpoint that were not started again yet; kept as groups in flight.
        """
        draws = {draw.group_id: draw for draw in (*also_in_flight, *(draw for draw, _ in self._in_flight.values()))}
        return BufferState(ready=list(self._ready), in_flight=[draws[group_id] for group_id in sorted(draws)])

    def _is_stale(self, step: Step, oldest: PolicyVersion) -> bool:
        return is_stale(step=step, oldest=oldest, max_off_policy_steps=self._max_off_policy_steps)

    def _drop(self, group: Draw | Group, reason: str) -> None:
        """Count a dropped group and write its event. The count is kept under the part of `reason` before a colon."""
        self.counters.dropped.append(LostGroup(env=group.env, reason=reason.split(":", 1)[0]))
        self._write_event(Drop(group_id=group.group_id, reason=reason))
