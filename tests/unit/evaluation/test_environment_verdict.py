"""The verdict on an environment, from made-up measurements."""

import re
from typing import Any

import pytest

from trivet.evaluation.environment_test import EnvironmentTest, PolicyResult
from trivet.evaluation.environment_verdict import Verdict, judge
from trivet.evaluation.scripted_policies import PolicyKind
from trivet.wire.groups import EnvironmentInfo

MEANS = {
    PolicyKind.NULL: 0.0,
    PolicyKind.CONSTANT: 0.1,
    PolicyKind.RANDOM: 0.05,
    PolicyKind.ECHO: 0.0,
    PolicyKind.INJECTING: 0.0,
    PolicyKind.GOLD: 1.0,
}


def measured(means: dict[PolicyKind, float] = MEANS, **changes: Any) -> EnvironmentTest:
    results = {policy: PolicyResult(rewards={0: [mean], 1: [mean]}) for policy, mean in means.items()}
    fields: dict[str, Any] = {
        "info": EnvironmentInfo(num_examples=2, num_eval_examples=2),
        "num_tested": 2,
        "num_answers": 2,
        "form": "{}",
        "results": results,
        "data_difference": None,
        "num_compared": 12,
        "changed": {},
    }
    return EnvironmentTest(**{**fields, **changes})


def test_an_environment_whose_answer_gets_more_than_nothing_is_worth_training_on() -> None:
    judgement = judge(measured())
    assert (judgement.verdict, judgement.floor, judgement.ceiling, judgement.problems) == (Verdict.YES, 0.05, 1.0, [])


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        (measured({**MEANS, PolicyKind.ECHO: 0.6}), "only repeats the question gets 0.6"),
        (measured({**MEANS, PolicyKind.INJECTING: 1.0}), "only claims to be right gets 1, where the floor is 0.05"),
        (measured({**MEANS, PolicyKind.CONSTANT: 0.9}), "the commonest answer, given to every question, gets 0.9"),
        (measured({**MEANS, PolicyKind.NULL: 1.0}), "the reference answer gets 1, no more than"),
        (measured(dict.fromkeys(MEANS, 0.5)), "every reply of every policy got the reward 0.5"),
        (measured(data_difference="other examples to train on, 2 as well"), "the data differ when a worker starts again"),
        (measured(changed={PolicyKind.GOLD: 0.25}), r"other rewards after a restart \(gold by up to 0.25\)"),
        (
            measured(results={**measured().results, PolicyKind.NULL: PolicyResult(num_failed=2, first_error="KeyError: 'x'")}),
            "2 of 2 groups of null failed, and would be lost: KeyError",
        ),
        (
            measured(results={**measured().results, PolicyKind.MODEL: PolicyResult(rewards={0: [0.0, 0.0], 1: [0.0, 0.0]})}),
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
        assert "pass --base-url" in judgement.notes[0]
