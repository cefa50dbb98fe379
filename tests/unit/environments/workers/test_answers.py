"""What a worker answers is checked before it is used: every way in which it can be wrong is named."""

import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from trivet.environments.workers.answers import VersionLimit, find_fault, find_info_fault
from trivet.wire.groups import EnvironmentInfo, GroupRequest, SamplingArguments
from trivet.wire.rollouts import GroupId, Rollout, Sample
from trivet.wire.versions import PolicyVersion, VersionRun

REQUEST = GroupRequest(
    group_id=GroupId(7), env="toy", example_id=0, num_rollouts=2, base_url="", sampling=SamplingArguments(temperature=1.0)
)


def make_sample(version: int = 3) -> Sample:
    return Sample(
        token_ids_T=np.array([5, 6, 7], dtype=np.int32),
        loss_mask_T=np.array([False, True, True]),
        logprobs_T=np.array([0, -0.5, -1.5], dtype=np.float32),
        versions=[VersionRun(PolicyVersion(version), 2)],
        temperature=1.0,
    )


def make_rollouts() -> list[Rollout]:
    return [Rollout(index=index, reward=1.0, samples=[make_sample()]) for index in range(2)]


def fault_of(change: Callable[[list[Rollout]], object], *, newest: int = 3) -> str | None:
    rollouts = make_rollouts()
    change(rollouts)
    return find_fault(rollouts, REQUEST, limit=VersionLimit(lambda: newest))


def replace_sample(**fields: object) -> Callable[[list[Rollout]], object]:
    return lambda rollouts: rollouts[1].samples.append(msgspec.structs.replace(make_sample(), **fields))


def replace_rollout(**fields: object) -> Callable[[list[Rollout]], object]:
    return lambda rollouts: rollouts.append(msgspec.structs.replace(rollouts.pop(), **fields))


def test_a_true_answer_has_no_fault():
    assert fault_of(lambda rollouts: None) is None
    assert fault_of(replace_rollout(samples=[])) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda rollouts: rollouts.pop(), "has 1 rollouts, where 2 were asked for", id="too few"),
        pytest.param(lambda rollouts: rollouts.append(rollouts[0]), "has 3 rollouts", id="too many"),
        pytest.param(lambda rollouts: rollouts.reverse(), "has rollout 1 in place 0", id="out of order"),
        pytest.param(replace_rollout(reward=float("nan")), "with the reward nan", id="no reward"),
        pytest.param(replace_rollout(reward=float("inf")), "with the reward inf", id="infinite reward"),
        pytest.param(replace_rollout(scores={"speed": float("nan")}), "with the score speed = nan", id="no score"),
        pytest.param(replace_rollout(generation_s=-1.0), "that took -1.0 s", id="negative time"),
        pytest.param(replace_rollout(advantage=9.0), "with numbers that a worker does not set", id="an advantage of its own"),
        pytest.param(replace_rollout(counted_tokens=-5), "with numbers that a worker does not set", id="negative count"),
        pytest.param(
            replace_sample(logprobs_T=np.zeros(2, dtype=np.float32)), r"logprobs_T has the shape \(2,\)", id="short logprobs"
        ),
        pytest.param(
            replace_sample(loss_mask_T=np.zeros(4, dtype=np.bool_)), r"loss_mask_T has the shape \(4,\)", id="long mask"
        ),
        pytest.param(replace_sample(token_ids_T=np.arange(3, dtype=np.int64)), "dtype int64", id="other dtype"),
        pytest.param(replace_sample(token_ids_T=np.zeros((3, 1), dtype=np.int32)), r"shape \(3, 1\)", id="a table"),
        pytest.param(replace_sample(token_ids_T=np.array([1, -2, 3], dtype=np.int32)), "negative", id="negative token"),
        pytest.param(
            replace_sample(loss_mask_T=np.ones(3, dtype=np.bool_)), "trained on from the first", id="trains on the first"
        ),
        pytest.param(
            replace_sample(logprobs_T=np.array([0, np.nan, -1], dtype=np.float32)),
            "log-probabilities from nan",
            id="no logprob",
        ),
        pytest.param(
            replace_sample(logprobs_T=np.array([0, 2.5, -1], dtype=np.float32)),
            "log-probabilities from -1.0 to 2.5",
            id="positive",
        ),
        pytest.param(replace_sample(temperature=float("nan")), "with the temperature nan", id="no temperature"),
        pytest.param(
            replace_sample(teacher_logprobs_T=np.zeros(3, dtype=np.float32)), "a teacher's log-probabilities", id="a teacher"
        ),
        pytest.param(
            replace_sample(versions=[VersionRun(3, 1)]), "2 sampled tokens and policy versions for 1", id="few versions"
        ),
        pytest.param(
            replace_sample(versions=[VersionRun(3, 9), VersionRun(2, -7)]), "policy versions for 2", id="negative run"
        ),
        pytest.param(
            replace_sample(versions=[VersionRun(-1, 2)]), "policy -1, which was never published", id="negative version"
        ),
        pytest.param(replace_sample(versions=[VersionRun(4, 2)]), "policy 4, which was never published", id="from the future"),
    ],
)
def test_an_answer_that_cannot_be_true_is_named(change: Callable[[list[Rollout]], object], said: str):
    fault = fault_of(change)
    assert fault is not None
    assert re.search(said, fault), fault


def test_the_newest_version_is_asked_for_only_when_a_newer_one_is_reported():
    asked: list[int] = []

    def newest() -> int:
        asked.append(5)
        return 5

    limit = VersionLimit(newest)
    assert [limit.is_exceeded(version) for version in (0, 5, 3, 4)] == [False] * 4
    assert asked == [5]
    assert limit.is_exceeded(6)
    assert not VersionLimit().is_exceeded(10**9)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (EnvironmentInfo(num_examples=2, example_hashes=["a", "b"]), None),
        (EnvironmentInfo(num_examples=2), None),
        (EnvironmentInfo(num_examples=-1), "says that it has -1 examples"),
        (EnvironmentInfo(num_examples=1, num_eval_examples=-3), "says that it has -3 examples"),
        (EnvironmentInfo(num_examples=2, example_hashes=["a"]), "has 1 hashes of 2 examples"),
    ],
)
def test_what_an_environment_says_of_its_data_is_checked(info: EnvironmentInfo, said: str | None):
    assert find_info_fault(info) == said
