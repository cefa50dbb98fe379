"""Which example the next group is of: a pure function of the run's seed and the group's id.

Examples of all environments stand in one row, shuffled anew each epoch; group id g takes place g mod N of epoch g div N. The
id alone therefore names the example: a resumed run dispatches a group again by its id.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trivet.algorithms.seeds import derive_seed
from trivet.wire.rollouts import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    group_id: GroupId
    env: str
    example_id: int
    """Row in the environment's data set."""


class ExampleSampler:
    def __init__(self, sizes: Mapping[str, int], *, seed: int, next_group_id: int = 0) -> None:
        """
        Args:
            sizes: number of examples by environment name, each at least 1.
        """
        self._offsets: list[tuple[int, str]] = []
        total = 0
        for env, size in sizes.items():
            self._offsets.append((total, env))
            total += size
        self._total = total
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None
        self.next_group_id = GroupId(next_group_id)

    def take(self) -> Draw:
        """The next group; its id is never handed out again."""
        draw = self.draw(self.next_group_id)
        self.next_group_id = GroupId(self.next_group_id + 1)
        return draw

    def draw(self, group_id: GroupId) -> Draw:
        epoch, place = divmod(group_id, self._total)
        row = int(self._permutation(epoch)[place])
        offset, env = next((offset, env) for offset, env in reversed(self._offsets) if offset <= row)
        return Draw(group_id=group_id, env=env, example_id=row - offset)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            rng = np.random.Generator(np.random.PCG64(derive_seed(self._seed, "examples", epoch)))
            self._order = (epoch, rng.permutation(self._total))
        return self._order[1]
