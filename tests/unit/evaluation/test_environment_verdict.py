"""The verdict on an environment, from made-up measurements."""

import re
from typing import Any

import pytest

from trivet.evaluation.environment_test import EnvironmentTest, PolicyResult
from trivet.evaluation.environment_verdict import Verdict, judge
from trivet.evaluation.scripted_policies import PolicyKind

MEANS = {
    PolicyKind.NULL: 0.0,
    PolicyKind.CONSTANT: 0.1,
    PolicyKind.RANDOM: 0.05,
    PolicyKind.INJECTING: 0.0,
    PolicyKind.GOLD: 1.0,
}


def measured(means: dict[PolicyKind, float] = MEANS, *others: PolicyResult, **changes: Any) -> EnvironmentTest:
    """Measurements with these mean rewards. `others` replace the results of their policies."""
    results = {policy: PolicyResult(policy=policy, rewards={0: [mean]}, mean_reward=mean) for policy, mean in means.items()}
    fields: dict[str, Any] = {
        "environment": "made-up",
        "num_examples": 2,
        "num_eval_examples": 2,
        "num_tested": 2,
        "num_answers": 2,
        "answer_form": "{}",
        "policies": list({**results, **{result.policy: result for result in others}}.values()),
        "data_difference": None,
        "largest_changes": {},
    }
    return EnvironmentTest(**{**fields, **changes})


def test_an_environment_whose_answer_gets_more_than_nothing_is_worth_training_on() -> None:
    judgement = judge(measured())
    assert (judgement.verdict, judgement.floor, judgement.ceiling, judgement.problems) == (Verdict.YES, 0.05, 1.0, [])


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        (measured({**MEANS, PolicyKind.INJECTING: 1.0}), "only claims to be right gets 1, where the floor is 0.05"),
        (measured({**MEANS, PolicyKind.CONSTANT: 0.9}), "the commonest answer, given to every question, gets 0.9"),
        (measured({**MEANS, PolicyKind.NULL: 1.0}), "the reference answer gets 1, no more than"),
        (measured(dict.fromkeys(MEANS, 0.5)), "the reference answer gets 0.5, no more than"),
        (measured(data_difference="other examples to train on, 2 as well"), "the data differ when a worker starts again"),
        (measured(largest_changes={PolicyKind.GOLD: 0.25}), r"other rewards after a restart \(gold by up to 0.25\)"),
        (
            measured(MEANS, PolicyResult(policy=PolicyKind.NULL, errors=["KeyError: 'x'"] * 2)),
            "2 of 2 groups of null failed, and would be lost: KeyError",
        ),
        (
            measured(
                MEANS, PolicyResult(policy=PolicyKind.MODEL, rewards={0: [0.0]}, mean_reward=0.0, share_without_signal=1.0)
            ),
            "100% of the model's groups have one reward",
        ),
    ],
)
def test_each_reason_against_an_environment_is_named(test: EnvironmentTest, problem: str) -> None:
    judgement = judge(test)
    assert judgement.verdict is Verdict.NO
    (found,) = judgement.problems
    assert re.search(problem, found), found


def test_without_an_answer_and_a_model_the_verdict_is_unknown() -> None:
    means = {policy: mean for policy, mean in MEANS.items() if policy is not PolicyKind.GOLD}
    for measured_means in (means, dict.fromkeys(means, 0.0)):
        judgement = judge(measured(measured_means, num_answers=0))
        assert judgement.verdict is Verdict.UNKNOWN
        assert any("pass --base-url" in note for note in judgement.notes)
