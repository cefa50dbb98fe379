"""Rates rollouts and examples by their rewards, and takes turns in given proportions without chance."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from trivet.algorithms.arithmetic import is_at_least

PASSING_REWARD = 1.0
"""Lowest reward of a rollout that counts as a success in pass@k, in training and in evaluation. Rubrics give 1.0 for a right answer
and less for a part of it. A rubric whose rewards all stay below 1.0 has pass@k 0."""


def has_passed(reward: float) -> bool:
    """Return whether a rollout with this reward counts as a success."""
    return is_at_least(reward, PASSING_REWARD)


class Difficulty(StrEnum):
    """The pool of an example."""

    EASY = "easy"
    NORMAL = "normal"
    HARD = "hard"


def difficulty_of(mean_reward: float, *, easy_threshold: float | None, hard_threshold: float | None) -> Difficulty:
    """Return the pool of an example by its last mean reward.

    Args:
        mean_reward: over the group.
        easy_threshold: this and above is easy; None: nothing is.
        hard_threshold: this and below is hard; None: nothing is.
    """
    if easy_threshold is not None and is_at_least(mean_reward, easy_threshold):
        return Difficulty.EASY
    if hard_threshold is not None and is_at_least(hard_threshold, mean_reward):
        return Difficulty.HARD
    return Difficulty.NORMAL


class FairTurns:
    """Hands out turns in given proportions: after n turns each name has had its share of n to within a turn or so.

    Without chance: the credits are the whole state.

    Source: smooth weighted round-robin, as in nginx's upstream balancing.
    """

    def __init__(self, ratios: Mapping[str, float], *, credits: Mapping[str, float] | None = None) -> None:
        """Start with no credit, or with that of an earlier state.

        Args:
            ratios: positive numbers of any sum.
            credits: of an earlier state; a name that it does not have starts at 0.
        """
        self._ratios = dict(ratios)
        self.credits = {name: (credits or {}).get(name, 0.0) for name in ratios}

    def take(self, names: Iterable[str]) -> str:
        """Return whose turn it is among `names`, at least one; the others keep their credit and gain none."""
        able = list(names)
        total = sum(self._ratios[name] for name in able)
        for name in able:
            self.credits[name] += self._ratios[name] / total
        chosen = max(able, key=lambda name: self.credits[name])
        self.credits[chosen] -= 1.0
        return chosen
