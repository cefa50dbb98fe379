import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.groups import NO_FILTERS, make_group
from trivet.algorithms.advantages import (
    AdvantageFunction,
    AdvantageInputs,
    leave_one_out,
    length_weighted_mean,
    mean_baseline,
    standardised,
)
from trivet.config.schema.orchestrator import (
    FiltersConfig,
    GibberishFilterConfig,
    RepetitionFilterConfig,
    ZeroAdvantageFilterConfig,
)
from trivet.orchestrator.filters import (
    FilterReason,
    RolloutFilter,
    enforced_filters,
    filter_reason,
    is_gibberish,
    is_repetitive,
    mask_rollouts,
)
from trivet.wire.rollouts import Group, Sample
from trivet.wire.versions import PolicyVersion, VersionRun

ZERO_ADVANTAGE = NO_FILTERS.model_copy(update={"zero_advantage": ZeroAdvantageFilterConfig(enforce=True)})


def sample_of(probabilities: Sequence[float], *, token_ids: Sequence[int] | None = None, prompt: int = 2) -> Sample:
    count = len(probabilities)
    logprobs = [0.0] * prompt + [math.log(probability) for probability in probabilities]
    return Sample(
        token_ids_T=np.array([200_000] * prompt + list(token_ids or [5] * count), dtype=np.int32),
        loss_mask_T=np.arange(prompt + count) >= prompt,
        logprobs_T=np.array(logprobs, dtype=np.float32),
        versions=[VersionRun(PolicyVersion(0), count)],
        temperature=1.0,
    )


def reason_of(group: Group, *, is_on: bool) -> FilterReason | None:
    num_sampled = sum(sample.num_loss_tokens for rollout in group.rollouts for sample in rollout.samples)
    return filter_reason(group, num_sampled=num_sampled, online_difficulty_filtering=is_on)


@pytest.mark.parametrize(
    ("rewards", "is_on", "expected"),
    [
        ([1.0, 1.0], True, FilterReason.ZERO_SIGNAL),
        ([0.5, 0.5], True, FilterReason.ZERO_SIGNAL),
        ([1.0, 1.0], False, None),
        ([1.0, 0.9], True, None),
        ([0.7 + 0.2 + 0.1, 1.0], True, FilterReason.ZERO_SIGNAL),
        ([0.1 + 0.2, 0.3, 0.1 * 3], True, FilterReason.ZERO_SIGNAL),
        ([0.5, 0.5 + 1e-9], True, None),
        ([1.0], True, None),
    ],
)
def test_a_group_of_equal_rewards_has_no_signal(rewards: list[float], is_on: bool, expected: FilterReason | None) -> None:
    assert reason_of(make_group(0, rewards), is_on=is_on) is expected


def test_a_group_in_which_nothing_was_sampled_says_so_before_all_else() -> None:
    group = make_group(0, (1.0, 1.0))
    for rollout in group.rollouts:
        rollout.samples = []
    assert reason_of(group, is_on=True) is FilterReason.NO_LOSS_TOKENS


@given(st.lists(st.booleans(), max_size=40), st.integers(2, 12))
def test_repetition_is_a_run_of_near_certain_tokens(certain: list[bool], window: int) -> None:
    sample = sample_of([0.999 if is_certain else 0.5 for is_certain in certain])
    longest = max((len(run) for run in "".join("x" if c else " " for c in certain).split()), default=0)
    assert is_repetitive(sample, RepetitionFilterConfig(window=window, prob_threshold=0.99)) is (longest >= window)


def test_gibberish_is_a_rare_token_that_the_model_held_for_impossible() -> None:
    rule = GibberishFilterConfig(token_id_threshold=100_000, max_logprob=-14.0)
    never = math.exp(-15)
    assert is_gibberish(sample_of([0.5, never], token_ids=[5, 100_001]), rule)
    assert not is_gibberish(sample_of([0.5, never], token_ids=[5, 100_000]), rule)
    assert not is_gibberish(sample_of([0.5, 0.5], token_ids=[5, 100_001]), rule)
    # Prompt tokens are rare here and carry no log-probability.
    assert not is_gibberish(sample_of([0.5]), rule)


def test_only_what_is_enforced_is_masked_and_only_in_its_rollout() -> None:
    group = make_group(0, (1.0, 0.0, 0.5))
    group.rollouts[0].samples = [sample_of([0.999] * 4), sample_of([0.5])]
    group.rollouts[1].samples[0].is_truncated = True
    measured, enforced = (
        FiltersConfig(repetition=RepetitionFilterConfig(window=4, prob_threshold=0.9, enforce=enforce), zero_advantage=None)
        for enforce in (False, True)
    )
    found = mask_rollouts(group, measured, masks_truncated=False)
    assert found == [RolloutFilter.REPETITION, RolloutFilter.TRUNCATED]
    assert all(sample.num_loss_tokens for rollout in group.rollouts for sample in rollout.samples)
    mask_rollouts(group, enforced, masks_truncated=False)
    tokens = [sum(sample.num_loss_tokens for sample in rollout.samples) for rollout in group.rollouts]
    assert tokens == [0, 4, 4]
    assert not group.rollouts[0].samples[0].logprobs_T.any()
    assert group.rewards.tolist() == [1.0, 0.0, 0.5]
    assert reason_of(group, is_on=False) is None


def test_filters_are_measured_unless_they_are_enforced() -> None:
    assert enforced_filters(FiltersConfig(), masks_truncated=False) == set()
    assert enforced_filters(FiltersConfig(), masks_truncated=True) == {RolloutFilter.TRUNCATED}
    filters = FiltersConfig(gibberish=None, repetition=RepetitionFilterConfig(window=9, enforce=True))
    assert enforced_filters(filters, masks_truncated=False) == {RolloutFilter.REPETITION}


def test_a_filter_that_is_enforced_is_the_reason_before_one_that_is_only_measured() -> None:
    group = make_group(0)
    group.rollouts[0].samples[0].is_truncated = True
    group.rollouts[0].advantage = 0.0
    group.rollouts[1].advantage = 1.0
    found = mask_rollouts(group, ZERO_ADVANTAGE, masks_truncated=False)
    assert found == [RolloutFilter.ZERO_ADVANTAGE]
    assert group.rollouts[0].samples[0].num_loss_tokens == 0


def test_a_group_whose_every_rollout_is_masked_is_filtered() -> None:
    group = make_group(0)
    for rollout in group.rollouts:
        rollout.samples[0].is_truncated = True
    mask_rollouts(group, NO_FILTERS, masks_truncated=True)
    assert filter_reason(group, num_sampled=8, online_difficulty_filtering=False) is FilterReason.ALL_MASKED


@pytest.mark.parametrize("function", [mean_baseline, length_weighted_mean, leave_one_out, partial(standardised, eps=1e-6)])
@pytest.mark.parametrize(("size", "reward"), [(6, 0.7), (3, 0.1), (7, 0.3)])
def test_the_zero_advantage_filter_finds_every_rollout_of_a_group_of_equal_rewards(
    function: AdvantageFunction, size: int, reward: float
) -> None:
    group = make_group(0, [reward] * size)
    for rollout, advantage in zip(group.rollouts, function(AdvantageInputs.from_group(group)), strict=True):
        rollout.advantage = float(advantage)
    assert mask_rollouts(group, ZERO_ADVANTAGE, masks_truncated=False) == [RolloutFilter.ZERO_ADVANTAGE] * size
    assert filter_reason(group, num_sampled=4 * size, online_difficulty_filtering=False) is FilterReason.ALL_MASKED


def test_what_rounding_leaves_of_a_custom_advantage_of_0_is_filtered() -> None:
    group = make_group(0, [0.7] * 6)
    for rollout in group.rollouts:
        rollout.advantage = float(rollout.reward - group.rewards.mean())
    assert group.rollouts[0].advantage != 0.0
    assert len(mask_rollouts(group, ZERO_ADVANTAGE, masks_truncated=False)) == 6


def test_a_group_of_equal_rewards_whose_advantages_differ_is_not_flat() -> None:
    group = make_group(0, rewards=(1.0, 1.0))
    assert filter_reason(group, num_sampled=8, online_difficulty_filtering=True) is FilterReason.ZERO_SIGNAL
    group.rollouts[0].advantage, group.rollouts[1].advantage = 0.5, -0.5
    assert filter_reason(group, num_sampled=8, online_difficulty_filtering=True) is None
