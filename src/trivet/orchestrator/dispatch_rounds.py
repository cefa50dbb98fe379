"""Makes the groups of a batch independent of timing: they start together, from one policy, and end in the order of ids.

A round is what the batch being filled still lacks. The next one starts when every group of the last has ended, so nothing is in
flight when a policy is loaded or a checkpoint is formed, and the groups, the policy and the state of the sampler are the same
in every run, resumed or not. Used by the dispatcher of a deterministic run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from trivet.algorithms.staleness import required_version
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import PolicyVersion, Step


@dataclass(slots=True, kw_only=True)
class DispatchRounds:
    """Says how many groups a round has, and keeps those that ended until all have."""

    num_groups: int
    """Groups of a batch."""
    max_async_level: int
    _ended: dict[GroupId, Callable[[], None]] = field(default_factory=dict[GroupId, Callable[[], None]])

    @property
    def num_ended(self) -> int:
        """Groups that have ended and wait for the others of their round."""
        return len(self._ended)

    def num_to_draw(self, *, step: Step, version: PolicyVersion, num_ready: int) -> int:
        """Return the number of groups of the next round; 0 while the servers serve another policy than batch `step` needs."""
        if self._ended or version != required_version(step=step, max_async_level=self.max_async_level):
            return 0
        return max(self.num_groups - num_ready, 0)

    def add_ended(self, group_id: GroupId, end: Callable[[], None]) -> None:
        """Keep how a group ended until its round is over.

        Args:
            end: hands the group on; called by `release`.
        """
        self._ended[group_id] = end

    def release(self) -> None:
        """Hand on every group of the round, in the order of their ids."""
        ended, self._ended = self._ended, {}
        for group_id in sorted(ended):
            ended[group_id]()
