"""Difficulty pools: which examples are parked as easy or hard, since when, and when they come back.

An example is named by its hash, so that the pools survive a data set that changes between two attempts; rows with one hash
are one example. What is not parked is normal. Called by the sampler alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from trivet.algorithms.difficulty import Difficulty, difficulty_of
from trivet.algorithms.rounding import round_down
from trivet.config.schema.orchestrator import BufferConfig
from trivet.wire.versions import Step


class ParkedExample(msgspec.Struct, frozen=True, kw_only=True):
    """An example that is easy or hard and passed over for now."""

    example_hash: str
    difficulty: Difficulty
    step: Step
    """The batch being filled when it was parked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Rows of one environment's data set by pool."""

    easy: int
    normal: int
    hard: int


class DifficultyPools:
    """Keeps which examples are parked."""

    def __init__(
        self,
        examples: Mapping[str, Sequence[str]],
        *,
        rules: BufferConfig,
        parked: Mapping[str, Sequence[ParkedExample]] | None = None,
    ) -> None:
        """Restore the pools of a checkpoint, or start with every example normal.

        Args:
            examples: hash of each row by environment.
            parked: of the checkpoint; its easy and hard fractions return to normal, longest parked first.
        """
        self._rules = rules
        self._num_rows = {env: Counter(hashes) for env, hashes in examples.items()}
        self._totals = {env: len(hashes) for env, hashes in examples.items()}
        self._parked: dict[str, dict[str, ParkedExample]] = {env: {} for env in examples}
        """By hash, longest parked first."""
        self._num_parked_rows: Counter[tuple[str, Difficulty]] = Counter()
        self.evicted: Counter[tuple[str, Difficulty]] = Counter()
        """Examples that left the normal pool since the caller last cleared it."""
        for env, members in (parked or {}).items():
            self._restore(env, members)

    def is_parked(self, env: str, example_hash: str) -> bool:
        """Return whether the example is passed over."""
        return example_hash in self._parked[env]

    def num_normal(self, env: str) -> int:
        """Rows that may be drawn."""
        return self.sizes(env).normal

    def sizes(self, env: str) -> PoolSizes:
        """Return the rows of each pool of `env`."""
        easy, hard = (self._num_parked_rows[env, difficulty] for difficulty in (Difficulty.EASY, Difficulty.HARD))
        return PoolSizes(easy=easy, hard=hard, normal=self._totals[env] - easy - hard)

    def judge(self, env: str, example_hash: str, *, mean_reward: float, step: Step) -> Difficulty:
        """Put an example where its group's mean reward says; its time in a pool starts anew."""
        rules = self._rules
        difficulty = difficulty_of(mean_reward, easy_threshold=rules.easy_threshold, hard_threshold=rules.hard_threshold)
        was_parked = self._remove(env, example_hash)
        if difficulty is not Difficulty.NORMAL:
            self._add(env, ParkedExample(example_hash=example_hash, difficulty=difficulty, step=step))
            self.evicted[env, difficulty] += not was_parked
        return difficulty

    def release(self, step: Step) -> int:
        """Return examples to normal that were parked `recheck_interval` steps before batch `step`; return how many."""
        interval = self._rules.recheck_interval
        if interval is None:
            return 0
        everything = [(env, parked) for env, members in self._parked.items() for parked in members.values()]
        due = [(env, parked) for env, parked in everything if step - parked.step >= interval]
        for env, parked in due:
            self._remove(env, parked.example_hash)
        return len(due)

    def snapshot(self) -> dict[str, list[ParkedExample]]:
        """Return the parked examples by environment, for a checkpoint."""
        return {env: list(members.values()) for env, members in self._parked.items() if members}

    def _restore(self, env: str, members: Sequence[ParkedExample]) -> None:
        known = [parked for parked in members if parked.example_hash in self._num_rows.get(env, ())]
        to_return = Counter(parked.difficulty for parked in known)
        fractions = {Difficulty.EASY: self._rules.easy_fraction, Difficulty.HARD: self._rules.hard_fraction}
        for difficulty, fraction in fractions.items():
            to_return[difficulty] = round_down(to_return[difficulty] * fraction)
        for parked in known:
            if to_return[parked.difficulty]:
                to_return[parked.difficulty] -= 1
            else:
                self._add(env, parked)

    def _add(self, env: str, parked: ParkedExample) -> None:
        self._parked[env][parked.example_hash] = parked
        self._num_parked_rows[env, parked.difficulty] += self._num_rows[env][parked.example_hash]

    def _remove(self, env: str, example_hash: str) -> bool:
        parked = self._parked[env].pop(example_hash, None)
        if parked is None:
            return False
        self._num_parked_rows[env, parked.difficulty] -= self._num_rows[env][example_hash]
        return True
