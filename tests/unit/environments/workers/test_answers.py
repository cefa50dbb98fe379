"""The shape and the numbers of what a worker answers are checked before it is used."""

import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from trivet.environments.workers.answers import find_fault
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import GroupId, Rollout, Sample
from trivet.wire.versions import PolicyVersion, VersionRun

REQUEST = GroupRequest(
    group_id=GroupId(7), env="toy", example_id=0, num_rollouts=2, base_url="", sampling=SamplingArguments(temperature=1.0)
)
SAMPLE = Sample(
    token_ids_T=np.array([5, 6, 7], dtype=np.int32),
    loss_mask_T=np.array([False, True, True]),
    logprobs_T=np.array([0, -0.5, -1.5], dtype=np.float32),
    versions=[VersionRun(PolicyVersion(3), 2)],
    temperature=1.0,
)


def fault_of(change: Callable[[list[Rollout]], object]) -> str | None:
    rollouts = [Rollout(index=index, reward=1.0, samples=[SAMPLE]) for index in range(2)]
    change(rollouts)
    return find_fault(rollouts, REQUEST)


def replace_sample(**fields: object) -> Callable[[list[Rollout]], object]:
    return lambda rollouts: rollouts[1].samples.append(msgspec.structs.replace(SAMPLE, **fields))


def replace_rollout(**fields: object) -> Callable[[list[Rollout]], object]:
    return lambda rollouts: rollouts.append(msgspec.structs.replace(rollouts.pop(), **fields))


def test_a_well_formed_answer_has_no_fault():
    assert fault_of(lambda rollouts: None) is None
    assert fault_of(replace_rollout(samples=[])) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        pytest.param(lambda rollouts: rollouts.pop(), "has 1 rollouts, where 2 in order were asked for", id="too few"),
        pytest.param(lambda rollouts: rollouts.append(rollouts[0]), "has 3 rollouts", id="too many"),
        pytest.param(lambda rollouts: rollouts.reverse(), "in order", id="out of order"),
        pytest.param(replace_rollout(reward=float("nan")), "with reward = nan", id="no reward"),
        pytest.param(replace_rollout(reward=float("inf")), "with reward = inf", id="infinite reward"),
        pytest.param(replace_rollout(scores={"speed": float("nan")}), "with speed = nan", id="no score"),
        pytest.param(
            replace_sample(logprobs_T=np.zeros(2, dtype=np.float32)), r"logprobs_T has the shape \(2,\)", id="short logprobs"
        ),
        pytest.param(replace_sample(token_ids_T=np.arange(3, dtype=np.int64)), "dtype int64", id="other dtype"),
        pytest.param(replace_sample(token_ids_T=np.zeros((3, 1), dtype=np.int32)), r"shape \(3, 1\)", id="a table"),
        pytest.param(
            replace_sample(logprobs_T=np.array([0, np.nan, -1], dtype=np.float32)), "that are no numbers", id="no logprob"
        ),
        pytest.param(
            replace_sample(versions=[VersionRun(PolicyVersion(3), 1)]),
            "2 sampled tokens and policy versions for 1",
            id="few versions",
        ),
    ],
)
def test_a_fault_is_named(change: Callable[[list[Rollout]], object], fault: str):
    assert re.search(fault, fault_of(change) or "")
