"""Decides what is left out of training: whole groups without a signal, and single rollouts that are broken.

The orchestrator's buffer calls it when a group finishes, after advantages are set, so that rollouts that are left out count for the
baseline. A rollout that is left out stays in its group with its reward; only its loss mask is cleared.
"""

import math
from enum import StrEnum

import numpy as np

from trivet.algorithms.arithmetic import are_equal
from trivet.algorithms.credit import advantages_of
from trivet.config.schema.orchestrator import FiltersConfig, GibberishFilterConfig, RepetitionFilterConfig
from trivet.wire.rollouts import Group, MaskedTokens, Rollout, Sample

_NO_ADVANTAGE = 1e-12
"""An advantage of at most this size counts as 0: a custom function may return a rounding error instead of 0."""


class FilterReason(StrEnum):
    """The reasons for which a group is not trained on."""

    ZERO_SIGNAL = "zero_signal"
    """The group is flat: every rollout has the same reward and the same advantage."""
    NO_LOSS_TOKENS = "no_loss_tokens"
    """The policy sampled no token of the group."""
    OVERLONG_PROMPT = "overlong_prompt"
    """The prompt leaves no token for a completion, in the server's context or within seq_len, to which the trainer cuts samples."""
    ALL_MASKED = "all_masked"
    """Every rollout matches an enforced filter."""


class RolloutFilter(StrEnum):
    """The filters of rollouts. If several match a rollout, the first counts, enforced filters before others."""

    TRUNCATED = "truncated"
    """A completion ended at a length limit."""
    REPETITION = "repetition"
    """The policy was nearly certain of many tokens in a row."""
    GIBBERISH = "gibberish"
    """A rare token was sampled although its probability was nearly 0."""
    ZERO_ADVANTAGE = "zero_advantage"
    """The reward equals the baseline, so nothing is learnt from the rollout."""


def filter_reason(
    group: Group, *, num_sampled: int, online_difficulty_filtering: bool, seq_len: int | None = None
) -> FilterReason | None:
    """Return why a group is not trained on, or None when it is.

    Args:
        group: the group after `mask_rollouts`.
        num_sampled: the loss tokens of all its rollouts before `mask_rollouts`.
        online_difficulty_filtering: leave out flat groups.
        seq_len: number of tokens to which the trainer cuts a sample; None: samples are not cut.
    """
    samples = [sample for rollout in group.rollouts for sample in rollout.samples]
    if num_sampled == 0:
        was_refused = not samples and all(rollout.ran_out_of_context for rollout in group.rollouts)
        return FilterReason.OVERLONG_PROMPT if was_refused else FilterReason.NO_LOSS_TOKENS
    masks = [sample.loss_mask_T if sample.masked is None else sample.masked.loss_mask_T for sample in samples]
    if not any(mask_T[:seq_len].any() for mask_T in masks):
        return FilterReason.OVERLONG_PROMPT
    if online_difficulty_filtering and len(group.rollouts) > 1 and is_flat(group):
        return FilterReason.ZERO_SIGNAL
    if not any(sample.num_loss_tokens for sample in samples):
        return FilterReason.ALL_MASKED
    return None


def is_flat(group: Group) -> bool:
    """Return whether nothing tells the rollouts apart: their rewards are equal, and so are their advantages.

    With equal rewards the advantages differ if they depend on more than the rewards.
    """
    return are_equal(group.rewards) and are_equal(np.concatenate([advantages_of(rollout) for rollout in group.rollouts]))


def enforced_filters(filters: FiltersConfig, *, masks_truncated: bool) -> set[RolloutFilter]:
    """Return the filters that mask a rollout from the loss; the others only count matches."""
    sections = {
        RolloutFilter.REPETITION: filters.repetition,
        RolloutFilter.GIBBERISH: filters.gibberish,
        RolloutFilter.ZERO_ADVANTAGE: filters.zero_advantage,
    }
    enforced = {name for name, section in sections.items() if section is not None and section.enforce}
    return enforced | {RolloutFilter.TRUNCATED} if masks_truncated else enforced


def mask_rollouts(group: Group, filters: FiltersConfig, *, masks_truncated: bool) -> list[RolloutFilter]:
    """Clear the loss mask of rollouts that match an enforced filter. `Sample.masked` keeps the mask and the log-probabilities.

    Returns the first matching filter of each rollout that has one. Enforced filters come before others.
    """
    enforced = enforced_filters(filters, masks_truncated=masks_truncated)
    first_matches: list[RolloutFilter] = []
    for rollout in group.rollouts:
        matches = [name for name in RolloutFilter if _matches(rollout, name, filters)]
        matches.sort(key=lambda name: name not in enforced)
        if not matches:
            continue
        first_matches.append(matches[0])
        if matches[0] in enforced:
            for sample in rollout.samples:
                sample.masked = MaskedTokens(loss_mask_T=sample.loss_mask_T, logprobs_T=sample.logprobs_T)
                sample.loss_mask_T = np.zeros_like(sample.loss_mask_T)
                sample.logprobs_T = np.zeros_like(sample.logprobs_T)
    return first_matches


def _matches(rollout: Rollout, name: RolloutFilter, filters: FiltersConfig) -> bool:
    match name:
        case RolloutFilter.TRUNCATED:
            return rollout.is_truncated
        case RolloutFilter.REPETITION:
            rule = filters.repetition
            return rule is not None and any(is_repetitive(sample, rule) for sample in rollout.samples)
        case RolloutFilter.GIBBERISH:
            rule = filters.gibberish
            return rule is not None and any(is_gibberish(sample, rule) for sample in rollout.samples)
        case RolloutFilter.ZERO_ADVANTAGE:
            return filters.zero_advantage is not None and bool((np.abs(advantages_of(rollout)) <= _NO_ADVANTAGE).all())


def is_repetitive(sample: Sample, rule: RepetitionFilterConfig) -> bool:
    """Return whether `rule.window` sampled tokens in a row were each sampled with a probability above the threshold.

    Source: the repetition filter of prime-rl, after MiniMax-M1 (arXiv 2506.13585), section 4, which stops such generations.
    """
    logprobs = sample.logprobs_T[sample.loss_mask_T]
    if len(logprobs) < rule.window:
        return False
    uncertain = np.flatnonzero(logprobs <= math.log(rule.prob_threshold))
    run_lengths = np.diff(uncertain, prepend=-1, append=len(logprobs)) - 1  # certain tokens between two uncertain ones
    return bool(run_lengths.max() >= rule.window)


def is_gibberish(sample: Sample, rule: GibberishFilterConfig) -> bool:
    """Return whether a rare token was sampled to which the policy gave a log-probability below the limit.

    Source: the gibberish filter of prime-rl.
    """
    is_rare = sample.loss_mask_T & (sample.token_ids_T > rule.token_id_threshold)
    return bool(np.any(sample.logprobs_T[is_rare] < rule.max_logprob))
