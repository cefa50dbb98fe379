"""What is asked of the environments for a draw, and what becomes of the rollouts that come back."""

import asyncio

import pytest

from support.groups import make_draw, make_sample
from trivet.algorithms.advantages import mean_baseline
from trivet.orchestrator.dispatch_limits import Limits
from trivet.orchestrator.group_runner import group_runner, has_older_tokens, make_group
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import PolicyVersion


class RecordingPool:
    """Keeps the requests, and answers each with no rollouts."""

    def __init__(self) -> None:
        self.requests: list[GroupRequest] = []

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        self.requests.append(request)
        return []


def test_the_environments_get_the_draw_its_server_and_the_sampling_of_that_moment():
    pool, temperatures = RecordingPool(), iter([0.25, 0.5])
    run_group = group_runner(
        pool,  # type: ignore[arg-type]  # only what is called
        sampling_of=lambda _: SamplingArguments(temperature=next(temperatures)),
        rollouts_per_example=3,
    )
    for group_id in (4, 5):
        asyncio.run(run_group(make_draw(group_id, example_id=9), base_url="http://a/v1"))
    assert [(request.group_id, request.example_id, request.num_rollouts) for request in pool.requests] == [(4, 9, 3), (5, 9, 3)]
    assert [(request.base_url, request.sampling.temperature) for request in pool.requests] == [
        ("http://a/v1", 0.25),
        ("http://a/v1", 0.5),
    ]


@pytest.mark.parametrize(("is_worth_nothing", "rewards"), [(False, [1.0, 0.0]), (True, [0.0, 0.0])])
def test_samples_are_cut_and_a_cut_rollout_keeps_its_reward_unless_it_is_worth_nothing(
    is_worth_nothing: bool, rewards: list[float]
):
    limits = Limits(
        rollouts_per_example=2,
        rollouts_per_step=2,
        max_rollouts_in_flight=2,
        max_async_level=1,
        seq_len=8,
        is_truncated_worth_nothing=is_worth_nothing,
    )
    rollouts = [
        Rollout(index=0, reward=1.0, samples=[make_sample(prompt=3, completion=9)]),
        Rollout(index=1, reward=0.0, samples=[make_sample(prompt=3, completion=2)]),
    ]
    group = make_group(make_draw(4), rollouts, limits=limits, advantage=mean_baseline)
    assert [rollout.samples[0].num_tokens for rollout in group.rollouts] == [8, 5]
    assert group.rewards.tolist() == rewards
    assert [rollout.advantage for rollout in group.rollouts] == [reward - sum(rewards) / 2 for reward in rewards]


def test_one_token_of_an_older_policy_is_noticed():
    rollouts = [Rollout(index=0, reward=0.0, samples=[make_sample(version=2, newest=3)])]
    assert has_older_tokens(rollouts, PolicyVersion(3))
    assert not has_older_tokens(rollouts, PolicyVersion(2))
