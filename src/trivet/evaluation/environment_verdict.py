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
    floor = max(_means(test, PolicyKind.NULL, PolicyKind.RANDOM), default=None)
    ceiling = max(_means(test, PolicyKind.GOLD, PolicyKind.MODEL), default=None)
    problems = [*_process_problems(test), *_reward_problems(test, floor=floor, ceiling=ceiling), *_model_problems(test)]
    has_range = floor is not None and ceiling is not None and ceiling > floor
    verdict = Verdict.NO if problems else Verdict.YES if has_range else Verdict.UNKNOWN
    return Judgement(verdict=verdict, floor=floor, ceiling=ceiling, problems=problems, notes=list(_notes(test)))


def _means(test: EnvironmentTest, *policies: PolicyKind) -> list[float]:
    means = [test.results[policy].mean for policy in policies if policy in test.results]
    return [mean for mean in means if mean is not None]


def _process_problems(test: EnvironmentTest) -> Iterator[str]:
    """Yield what makes training unsound, whatever the rewards are."""
    if test.data_difference is not None:
        yield (
            f"the data differ when a worker starts again ({test.data_difference}): a resumed run would train on other examples; "
            "fix the order and the seed with which load_environment makes its data"
        )
    if test.changed:
        listed = ", ".join(f"{policy} by up to {change:.3g}" for policy, change in test.changed.items())
        yield f"the same replies got other rewards after a restart ({listed}): the reward or the environment draws at random"
    for policy, result in test.results.items():
        if result.num_failed:
            total = result.num_failed + len(result.rewards)
            yield f"{result.num_failed} of {total} groups of {policy} failed, and would be lost: {result.first_error}"


def _reward_problems(test: EnvironmentTest, *, floor: float | None, ceiling: float | None) -> Iterator[str]:
    every = [reward for result in test.results.values() for group in result.rewards.values() for reward in group]
    if every and max(every) - min(every) < 1e-9:
        if ceiling is not None:
            yield f"every reply of every policy got the reward {every[0]:g}: nothing can be learnt from it"
        return
    gold = test.results[PolicyKind.GOLD].mean if PolicyKind.GOLD in test.results else None
    if gold is not None and floor is not None and gold <= floor:
        yield (
            f"the reference answer gets {gold:.3g}, no more than an answer that says nothing or something at random ({floor:.3g}): "
            "the reward does not read the answer, or expects a form that was not tried"
        )
    elif floor is not None and ceiling is not None and ceiling > floor:
        limit = floor + _LEAK_SHARE * (ceiling - floor)
        leaks = {
            PolicyKind.ECHO: "an answer that only repeats the question",
            PolicyKind.INJECTING: "an answer that only claims to be right",
            PolicyKind.CONSTANT: "the commonest answer, given to every question,",
        }
        for policy, what in leaks.items():
            for mean in _means(test, policy):
                if mean >= limit:
                    yield f"{what} gets {mean:.3g}, where the floor is {floor:.3g} and a good answer gets {ceiling:.3g}"


def _model_problems(test: EnvironmentTest) -> Iterator[str]:
    if (result := test.results.get(PolicyKind.MODEL)) is None or (share := result.share_without_signal) is None:
        return
    if share > _MAX_WITHOUT_SIGNAL:
        yield (
            f"{share:.0%} of the model's groups have one reward for all rollouts, and train nothing (mean reward "
            f"{result.mean:.3g}): choose examples that it solves sometimes, or warm it up first"
        )


def _notes(test: EnvironmentTest) -> Iterator[str]:
    if not test.num_answers:
        yield "the data have no reference answer, so only a model can show that a good answer gets more: pass --base-url"
    elif test.num_answers < test.num_tested:
        yield f"{test.num_tested - test.num_answers} of {test.num_tested} tested examples have no reference answer"
    if PolicyKind.MODEL not in test.results:
        yield "no model was played (--base-url), so the share of groups without signal is unknown"
    if not test.info.num_eval_examples:
        yield "there is no evaluation data set"
