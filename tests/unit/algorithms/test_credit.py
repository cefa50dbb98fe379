"""Advantages of turns, agents and tokens, compared with sums that are written out in float64 and exact fractions."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.groups import NO_FILTERS, make_group
from trivet.algorithms.advantages import AdvantageInputs, agent_baselines, mean_baseline, turn_returns
from trivet.algorithms.credit import set_advantages
from trivet.config.schema.orchestrator import FiltersConfig
from trivet.orchestrator.filters import FilterReason, RolloutFilter, filter_reason, mask_rollouts
from trivet.wire.rollouts import Group, Rollout, Sample, TurnRun
from trivet.wire.versions import GroupId, PolicyVersion, VersionRun

GRID = st.integers(-64, 64).map(lambda value: value / 16)  # sums of these are exact
TURNS = st.lists(st.tuples(GRID, st.integers(0, 4)), min_size=1, max_size=5)


def make_sample(turns: list[TurnRun], *, agent: str = "") -> Sample:
    """A sample whose sampled tokens of turn k have the ids 100 k, 100 k + 1 and so on; a prompt token is before each turn."""
    ids = [token for run in turns for token in (-1, *range(100 * run.turn, 100 * run.turn + run.length))]
    mask_T = np.array(ids) >= 0
    return Sample(
        token_ids_T=np.array(ids, dtype=np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.zeros(len(ids), dtype=np.float32),
        versions=[VersionRun(PolicyVersion(0), int(mask_T.sum()))],
        temperature=1.0,
        turns=turns,
        agent=agent,
    )


def group_of(*rollouts: Rollout) -> Group:
    return Group(group_id=GroupId(0), env="toy", example_id=0, rollouts=list(rollouts))


@given(drawn=st.lists(st.tuples(GRID, TURNS), min_size=2, max_size=6))
def test_rewards_from_a_turn_on_are_compared_with_those_of_the_other_rollouts_at_that_turn(drawn) -> None:
    group = group_of(
        *(
            Rollout(
                index=index,
                reward=reward,
                num_turns=len(turns),
                turn_rewards=[value for value, _ in turns],
                samples=[make_sample([TurnRun(number, length) for number, (_, length) in enumerate(turns)])],
            )
            for index, (reward, turns) in enumerate(drawn)
        )
    )
    found = turn_returns(AdvantageInputs.from_group(group))
    returns = [
        [Fraction(reward) + sum(Fraction(v) for v, _ in turns[k:]) for k in range(len(turns))] for reward, turns in drawn
    ]
    for index, (_, turns) in enumerate(drawn):
        expected: list[float] = []
        for k, (_, length) in enumerate(turns):
            column = [values[k] for values in returns if len(values) > k]
            expected += [float(returns[index][k] - sum(column, Fraction()) / len(column))] * length
        np.testing.assert_allclose(found[index], expected, rtol=1e-12, atol=1e-10)


def test_with_one_turn_and_no_reward_for_it_a_turn_has_the_default_advantage() -> None:
    group = make_group(0, (0.0, 1.0, 0.5))
    for rollout in group.rollouts:
        rollout.turn_rewards = [0.0]
    inputs = AdvantageInputs.from_group(group)
    for values, one in zip(turn_returns(inputs), mean_baseline(inputs), strict=True):
        np.testing.assert_array_equal(values, [one] * 4)


def test_turn_rewards_that_are_missing_are_named_and_those_of_truncated_rollouts_can_count_as_0() -> None:
    group = make_group(0)
    group.rollouts[0].turn_rewards = [2.0]
    group.rollouts[0].samples[0].is_truncated = True
    with pytest.raises(ValueError, match="rollout 1 has 1 turns and 0 turn rewards"):
        turn_returns(AdvantageInputs.from_group(group))
    assert AdvantageInputs.from_group(group).turn_rewards[0].tolist() == [2.0]
    assert AdvantageInputs.from_group(group, zeroes_truncated=True).turn_rewards[0].tolist() == [0.0]


def test_an_agent_is_compared_with_itself_in_the_other_rollouts_where_it_played() -> None:
    def play(index: int, solver: float, critic: float | None) -> Rollout:
        samples = [make_sample([TurnRun(0, 2)], agent="solver")]
        scores = {"solver/reward": solver}
        if critic is not None:
            samples.append(make_sample([TurnRun(1, 1)], agent="critic"))
            scores["critic/reward"] = critic
        return Rollout(index=index, reward=0.0, num_turns=len(samples), samples=samples, scores=scores)

    inputs = AdvantageInputs.from_group(group_of(play(0, 1.0, 100.0), play(1, 0.0, 300.0), play(2, 0.5, None)))
    found = agent_baselines(inputs)
    assert [values.tolist() for values in found] == [[0.5, 0.5, -100.0], [-0.5, -0.5, 100.0], [0.0, 0.0]]


def test_an_episode_of_one_agent_has_the_default_advantage_at_every_token() -> None:
    inputs = AdvantageInputs.from_group(make_group(0, (0.0, 1.0)))
    assert [values.tolist() for values in agent_baselines(inputs)] == [[-0.5] * 4, [0.5] * 4]


def test_values_go_to_the_tokens_turn_by_turn_also_where_a_later_turn_is_in_an_earlier_sample() -> None:
    samples = [make_sample([TurnRun(0, 2), TurnRun(2, 1)]), make_sample([TurnRun(1, 2)])]
    rollout = Rollout(index=0, reward=1.0, num_turns=4, samples=samples)
    inputs = AdvantageInputs.from_group(group_of(rollout))
    assert inputs.token_ids[0].tolist() == [0, 1, 100, 101, 200]
    assert inputs.turn_lengths[0].tolist() == [2, 2, 1, 0]
    [values] = inputs.per_token([np.array([1.0, 2.0, 3.0, 4.0])])
    set_advantages(rollout, values)
    assert samples[0].advantages_T is not None
    assert samples[1].advantages_T is not None
    assert samples[0].advantages_T.tolist() == [0, 1, 1, 0, 3]  # 0 where a prompt token is
    assert samples[1].advantages_T.tolist() == [0, 2, 2]
    assert samples[0].advantages_T.dtype == np.float32
    assert rollout.advantage == pytest.approx(9 / 5)
    with pytest.raises(ValueError, match="got 2 values for the turns of rollout 0, must be 4: one per turn"):
        inputs.per_token([np.zeros(2)])
    set_advantages(rollout, 0.25)  # one number again, as when a record is replayed
    assert (rollout.advantage, samples[0].advantages_T) == (0.25, None)


def test_a_rollout_without_advantage_is_one_whose_tokens_all_have_none() -> None:
    group = make_group(0, (1.0, 1.0))
    for rollout, values in zip(group.rollouts, ([1.0, -1.0, 1.0, -1.0], [0.0] * 4), strict=True):
        set_advantages(rollout, np.array(values))
    assert group.rollouts[0].advantage == 0.0  # its mean
    assert mask_rollouts(group, FiltersConfig(), masks_truncated=False) == [RolloutFilter.ZERO_ADVANTAGE]
    assert filter_reason(group, num_sampled=8, online_difficulty_filtering=True) is None
    set_advantages(group.rollouts[0], np.zeros(4))
    assert filter_reason(group, num_sampled=8, online_difficulty_filtering=True) is FilterReason.ZERO_SIGNAL


def test_a_rollout_without_tokens_has_an_advantage_of_0() -> None:
    group = group_of(*(Rollout(index=index, reward=float(index), num_turns=1, turn_rewards=[1.0]) for index in range(2)))
    inputs = AdvantageInputs.from_group(group)
    assert [len(values) for values in turn_returns(inputs)] == [0, 0]
    set_advantages(group.rollouts[1], turn_returns(inputs)[1])
    assert group.rollouts[1].advantage == 0.0
    assert agent_baselines(replace(inputs, turn_agents=[[""], [""]]))[1].shape == (0,)


def test_equal_advantages_of_all_tokens_are_flat_whatever_the_prompts_hold() -> None:
    group = group_of(*(Rollout(index=index, reward=1.0, samples=[make_sample([TurnRun(0, 3)])]) for index in range(2)))
    for rollout in group.rollouts:
        set_advantages(rollout, np.ones(3))
    group.rollouts[0].ran_out_of_context = True
    mask_rollouts(group, NO_FILTERS, masks_truncated=True)
    assert filter_reason(group, num_sampled=6, online_difficulty_filtering=True) is FilterReason.ZERO_SIGNAL
