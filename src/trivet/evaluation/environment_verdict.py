"""Judges from the measurements of an environment whether it is worth training on. Pure."""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from trivet.evaluation.environment_test import EnvironmentTest
from trivet.evaluation.scripted_policies import PolicyKind

_LEAK_SHARE = 0.5
"""Share of the way from floor to ceiling. If a policy that answers nothing gets more, training will find that way too."""
_MAX_WITHOUT_SIGNAL = 0.5
"""Share of the model's groups without signal above which most of what is generated trains nothing."""
_LEAKS = {
    PolicyKind.INJECTING: "an answer that only claims to be right",
    PolicyKind.CONSTANT: "the commonest answer, given to every question,",
}


class Verdict(StrEnum):
    """Whether an environment is worth training on."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"
    """Nothing speaks against it, but nothing showed that a good answer gets more."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on an environment with its reasons."""

    verdict: Verdict
    floor: float | None
    """The highest mean reward of a policy that says nothing, or something at random."""
    ceiling: float | None
    """The highest mean reward of the reference answer or the model; None if neither was played."""
    problems: list[str]
    notes: list[str]


def judge(test: EnvironmentTest) -> Judgement:
    """Return the verdict: no with any problem, yes if a good answer got more than the floor, else unknown."""
    means = {result.policy: result.mean_reward for result in test.policies if result.mean_reward is not None}
    floor = max((means[policy] for policy in (PolicyKind.NULL, PolicyKind.RANDOM) if policy in means), default=None)
    ceiling = max((means[policy] for policy in (PolicyKind.GOLD, PolicyKind.MODEL) if policy in means), default=None)
    problems = [*_find_faults(test), *_find_leaks(means, floor=floor, ceiling=ceiling)]
    has_range = floor is not None and ceiling is not None and ceiling > floor
    verdict = Verdict.NO if problems else Verdict.YES if has_range else Verdict.UNKNOWN
    return Judgement(verdict=verdict, floor=floor, ceiling=ceiling, problems=problems, notes=list(_find_gaps(test)))


def _find_faults(test: EnvironmentTest) -> Iterator[str]:
    """Yield what makes training unsound or useless, whatever the answers are."""
    if test.data_difference is not None:
        yield (
            f"the data differ when a worker starts again ({test.data_difference}): a resumed run would train on other examples; "
            "fix the order and the seed with which load_environment makes its data"
        )
    if test.largest_changes:
        listed = ", ".join(f"{policy} by up to {change:.3g}" for policy, change in test.largest_changes.items())
        yield f"the same replies got other rewards after a restart ({listed}): the reward or the environment draws at random"
    for result in test.policies:
        if result.errors:
            total = len(result.errors) + len(result.rewards)
            yield f"{len(result.errors)} of {total} groups of {result.policy} failed, and would be lost: {result.errors[0]}"
        if result.policy is PolicyKind.MODEL and (share := result.share_without_signal or 0.0) > _MAX_WITHOUT_SIGNAL:
            yield (
                f"{share:.0%} of the model's groups have one reward for all rollouts, and train nothing (mean reward "
                f"{result.mean_reward:.3g}): choose examples that it solves sometimes, or warm it up first"
            )


def _find_leaks(means: dict[PolicyKind, float], *, floor: float | None, ceiling: float | None) -> Iterator[str]:
    """Yield how the reward misses what a good answer is."""
    gold = means.get(PolicyKind.GOLD)
    if floor is None or ceiling is None:
        return
    if gold is not None and gold <= floor:
        yield (
            f"the reference answer gets {gold:.3g}, no more than an answer that says nothing or something at random "
            f"({floor:.3g}): the reward does not read the answer, or expects a form that was not tried"
        )
    elif ceiling > floor:
        for policy, what in _LEAKS.items():
            mean = means.get(policy, floor)
            if mean >= floor + _LEAK_SHARE * (ceiling - floor):
                yield f"{what} gets {mean:.3g}, where the floor is {floor:.3g} and a good answer gets {ceiling:.3g}"


def _find_gaps(test: EnvironmentTest) -> Iterator[str]:
    """Yield what the test could not find out."""
    rewards = {reward for result in test.policies for group in result.rewards.values() for reward in group}
    if len(rewards) == 1:
        yield f"every reply of every policy got the reward {rewards.pop():g}: nothing showed that it depends on the reply"
    if not test.num_answers:
        yield "the data have no reference answer, so only a model can show that a good answer gets more: pass --base-url"
    elif test.num_answers < test.num_tested:
        yield f"{test.num_tested - test.num_answers} of {test.num_tested} tested examples have no reference answer"
    if all(result.policy is not PolicyKind.MODEL for result in test.policies):
        yield "no model was played (--base-url), so the share of groups without signal is unknown"
    if not test.num_eval_examples:
        yield "there is no evaluation data set"
