"""Classifies rollouts and examples by their rewards, and chooses among environments in given proportions."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from trivet.algorithms.arithmetic import is_at_least

PASSING_REWARD = 1.0
"""Lowest reward of a rollout that counts as a success in pass@k, in training and in evaluation. Rubrics give 1.0 for a right answer
and less for a partly right one. If all rewards of a rubric are below 1.0, its pass@k is 0."""


def has_passed(reward: float) -> bool:
    """Return whether a rollout with this reward counts as a success."""
    return is_at_least(reward, PASSING_REWARD)


class Difficulty(StrEnum):
    """The pool of an example."""

    EASY = "easy"
    NORMAL = "normal"
    HARD = "hard"


def rate_difficulty(mean_reward: float, *, easy_threshold: float | None, hard_threshold: float | None) -> Difficulty:
    """Return the pool of an example by its last mean reward.

    Args:
        mean_reward: over the group.
        easy_threshold: a mean of at least this is easy; None: no example is easy.
        hard_threshold: a mean of at most this is hard; None: no example is hard.
    """
    if easy_threshold is not None and is_at_least(mean_reward, easy_threshold):
        return Difficulty.EASY
    if hard_threshold is not None and is_at_least(hard_threshold, mean_reward):
        return Difficulty.HARD
    return Difficulty.NORMAL


class WeightedRoundRobin:
    """Chooses names in given proportions: each name is chosen about as often as its share of all choices.

    No choice is random: it follows from the credits, which are the whole state.

    Source: smooth weighted round-robin, as in nginx's upstream balancing.
    """

    def __init__(self, ratios: Mapping[str, float], *, credits: Mapping[str, float] | None = None) -> None:
        """Start without credits, or with the credits of an earlier object.

        Args:
            ratios: the weight of each name, above 0; their sum does not matter.
            credits: the credits of an earlier object; other names start at 0.
        """
        self._ratios = dict(ratios)
        self.credits = {name: (credits or {}).get(name, 0.0) for name in ratios}

    def choose(self, names: Iterable[str]) -> str:
        """Choose one of `names`, at least one. Credits of other names do not change."""
        candidates = list(names)
        total = sum(self._ratios[name] for name in candidates)
        for name in candidates:
            self.credits[name] += self._ratios[name] / total
        chosen = max(candidates, key=lambda name: self.credits[name])
        self.credits[chosen] -= 1.0
        return chosen
