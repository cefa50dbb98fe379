"""Remembers what became of groups since the last batch. Filled by the buffer, read by metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trivet.algorithms.difficulty import has_passed
from trivet.algorithms.filters import FilterReason, RolloutFilter
from trivet.algorithms.rounding import are_equal, rounding_error
from trivet.wire.rollouts import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """The properties of a group that metrics need, without its tokens."""

    env: str
    example_id: int
    num_rollouts: int
    num_passed: int
    """Rollouts that succeeded: see `has_passed`."""
    is_flat: bool
    """All rewards are equal."""
    is_solved: bool
    """All rewards are above 0."""
    found: Sequence[RolloutFilter]
    """What the filters found in its rollouts."""
    filtered: FilterReason | None
    """Why it is not trained on."""

    @classmethod
    def of(cls, group: Group, *, found: Sequence[RolloutFilter] = (), filtered: FilterReason | None = None) -> "FinishedGroup":
        """Summarize `group`, with the findings of the filters."""
        rewards = group.rewards
        return cls(
            env=group.env,
            example_id=group.example_id,
            num_rollouts=len(rewards),
            num_passed=sum(has_passed(reward) for reward in rewards.tolist()),
            is_flat=are_equal(rewards),
            is_solved=bool(rewards.min() > rounding_error(rewards)),
            found=tuple(found),
            filtered=filtered,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGroup:
    """A group that failed or was dropped."""

    env: str
    reason: str
    """Type of the error of a failed group, or why it was dropped."""
    is_infrastructure: bool = False
    """A server, a worker or the network failed it, and nothing that the policy did."""


@dataclass(slots=True)
class GroupCounters:
    """Counts groups by how they ended. The loop takes it when a batch is formed and puts a new one in its place."""

    finished: list[FinishedGroup] = field(default_factory=list[FinishedGroup])
    failed: list[LostGroup] = field(default_factory=list[LostGroup])
    dropped: list[LostGroup] = field(default_factory=list[LostGroup])

    def add_failed(self, env: str, *, kind: str, is_infrastructure: bool = False) -> None:
        """Count a failed group.

        Args:
            kind: type of the error behind it.
            is_infrastructure: see `LostGroup`.
        """
        self.failed.append(LostGroup(env=env, reason=kind, is_infrastructure=is_infrastructure))

    def add_dropped(self, env: str, reason: str) -> None:
        """Count a dropped group under the part of `reason` before a colon."""
        self.dropped.append(LostGroup(env=env, reason=reason.split(":", 1)[0]))
