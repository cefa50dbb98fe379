"""Test what is asked of the environments for a draw, and what is made of the rollouts that come back."""

import asyncio

import pytest

from support.groups import make_draw, make_sample
from trivet.algorithms.advantages import mean_baseline
from trivet.config.schema.environment import EnvConfig, EnvSamplingConfig, SamplingConfig, TempSchedulerConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.orchestrator.dispatcher import group_runner, make_group
from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import Rollout


class RecordingPool:
    """Keeps the requests, and answers each with no rollouts."""

    def __init__(self) -> None:
        self.requests: list[GroupRequest] = []

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        self.requests.append(request)
        return []


def test_the_environments_get_the_draw_its_server_and_the_sampling_of_its_step():
    config = OrchestratorConfig(
        env=[EnvConfig(id="toy"), EnvConfig(id="short", sampling=EnvSamplingConfig(temperature=0.3, max_tokens=5))],
        rollouts_per_example=4,
        sampling=SamplingConfig(
            temp_scheduler=TempSchedulerConfig(start_temperature=1.0, end_temperature=0.5, total_steps=6), max_tokens=64, seed=3
        ),
    )
    pool = RecordingPool()
    run_group = group_runner(pool, config)  # type: ignore[arg-type]  # only what is called
    for group_id, (env, step) in enumerate((("toy", 1), ("toy", 6), ("short", 6))):
        asyncio.run(run_group(make_draw(group_id, env=env, example_id=9, step=step), "http://a/v1"))
    assert [(request.group_id, request.env, request.example_id, request.num_rollouts) for request in pool.requests] == [
        (0, "toy", 9, 4),
        (1, "toy", 9, 4),
        (2, "short", 9, 4),
    ]
    assert {request.base_url for request in pool.requests} == {"http://a/v1"}
    sampled = [request.sampling for request in pool.requests]
    assert [sampling.temperature for sampling in sampled] == [1.0, 0.5, 0.3]
    assert [sampling.fields["max_tokens"] for sampling in sampled] == [64, 64, 5]
    assert {sampling.seed for sampling in sampled} == {3}


@pytest.mark.parametrize(("is_worth_nothing", "rewards"), [(False, [1.0, 0.0]), (True, [0.0, 0.0])])
def test_samples_are_cut_and_a_cut_rollout_keeps_its_reward_unless_it_is_worth_nothing(
    is_worth_nothing: bool, rewards: list[float]
):
    config = OrchestratorConfig(seq_len=8, zero_truncated_completions=is_worth_nothing)
    rollouts = [
        Rollout(index=0, reward=1.0, samples=[make_sample(prompt=3, completion=9)]),
        Rollout(index=1, reward=0.0, samples=[make_sample(prompt=3, completion=2)]),
    ]
    group = make_group(make_draw(4), rollouts, config=config, advantage=mean_baseline)
    assert [rollout.samples[0].num_tokens for rollout in group.rollouts] == [8, 5]
    assert group.rewards.tolist() == rewards
    assert [rollout.advantage for rollout in group.rollouts] == [reward - sum(rewards) / 2 for reward in rewards]
