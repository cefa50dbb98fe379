"""Decides what is left out of training: whole groups that carry no signal, single rollouts that are broken.

Both look at groups whose advantages are set, so nothing that is left out moves a baseline. A rollout that is left out stays in
its group with its reward; only its loss mask is cleared. Called by the buffer when a group finishes.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from trivet.algorithms.arithmetic import are_equal
from trivet.wire.rollouts import Group, MaskedTokens, Rollout, Sample

_NO_ADVANTAGE = 1e-12
"""An advantage of this size or less counts as 0: a custom function may leave over what rounding made of a 0."""


class FilterReason(StrEnum):
    """The reasons for which a group is not trained on."""

    ZERO_SIGNAL = "zero_signal"
    """Every rollout has the same reward, so every advantage is zero."""
    NO_LOSS_TOKENS = "no_loss_tokens"
    """Nothing in the group was sampled by the policy."""
    OVERLONG_PROMPT = "overlong_prompt"
    """The prompt leaves no room for a completion: in the server's context, or within seq_len, of which the trainer sees no more."""
    ALL_MASKED = "all_masked"
    """A filter that is enforced found something in every rollout."""


class RolloutFilter(StrEnum):
    """The conditions that are looked for in a rollout; the first that fits is its reason."""

    TRUNCATED = "truncated"
    """A completion ended at a length limit."""
    REPETITION = "repetition"
    """A long run of tokens that the model was nearly certain of."""
    GIBBERISH = "gibberish"
    """A rare token to which the model gave next to no probability."""
    ZERO_ADVANTAGE = "zero_advantage"
    """Nothing is learnt from it: its reward equals the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """The limits of the repetition filter."""

    window: int
    """Consecutive sampled tokens."""
    prob_threshold: float
    """Each of them was sampled with a probability above this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gibberish:
    """The limits of the gibberish filter."""

    token_id_threshold: int
    """Greater ids are rare tokens."""
    max_logprob: float
    """Below this a token was next to impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilters:
    """The filters of a run, and which of them mask what they find."""

    repetition: Repetition | None = None
    gibberish: Gibberish | None = None
    is_measuring_zero_advantage: bool = False
    enforced: frozenset[RolloutFilter] = frozenset()


def filter_reason(
    group: Group, *, num_sampled: int, online_difficulty_filtering: bool, seq_len: int | None = None
) -> FilterReason | None:
    """Return why a group is not trained on, or None when it is.

    Args:
        group: after `mask_rollouts`.
        num_sampled: loss tokens over all rollouts before it.
        seq_len: tokens of a sample that the trainer sees; None: all.
    """
    samples = [sample for rollout in group.rollouts for sample in rollout.samples]
    if num_sampled == 0:
        was_refused = not samples and all(rollout.ran_out_of_context for rollout in group.rollouts)
        return FilterReason.OVERLONG_PROMPT if was_refused else FilterReason.NO_LOSS_TOKENS
    masks = [sample.loss_mask_T if sample.masked is None else sample.masked.loss_mask_T for sample in samples]
    if not any(mask_T[:seq_len].any() for mask_T in masks):
        return FilterReason.OVERLONG_PROMPT
    rewards = group.rewards
    if online_difficulty_filtering and len(rewards) > 1 and are_equal(rewards):
        return FilterReason.ZERO_SIGNAL
    if not any(sample.num_loss_tokens for sample in samples):
        return FilterReason.ALL_MASKED
    return None


def mask_rollouts(group: Group, filters: RolloutFilters) -> list[RolloutFilter]:
    """Clear the loss mask of rollouts in which an enforced filter finds something; what it was stays in `Sample.masked`.

    Returns one entry for each rollout in which any filter finds something. Enforced filters come first.
    """
    found: list[RolloutFilter] = []
    for rollout in group.rollouts:
        matches = [name for name in RolloutFilter if _matches(rollout, name, filters)]
        matches.sort(key=lambda name: name not in filters.enforced)
        if not matches:
            continue
        found.append(matches[0])
        if matches[0] in filters.enforced:
            for sample in rollout.samples:
                sample.masked = MaskedTokens(loss_mask_T=sample.loss_mask_T, logprobs_T=sample.logprobs_T)
                sample.loss_mask_T = np.zeros_like(sample.loss_mask_T)
                sample.logprobs_T = np.zeros_like(sample.logprobs_T)
    return found


def _matches(rollout: Rollout, name: RolloutFilter, filters: RolloutFilters) -> bool:
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
            return filters.is_measuring_zero_advantage and abs(rollout.advantage) <= _NO_ADVANTAGE


def is_repetitive(sample: Sample, rule: Repetition) -> bool:
    """Return whether `rule.window` sampled tokens in a row were each sampled with a probability above the threshold.

    Source: the repetition filter of prime-rl, after MiniMax-M1 (arXiv 2506.13585), section 4, which stops such generations.
    """
    logprobs = sample.logprobs_T[sample.loss_mask_T]
    if len(logprobs) < rule.window:
        return False
    doubts = np.flatnonzero(logprobs <= math.log(rule.prob_threshold))
    runs = np.diff(doubts, prepend=-1, append=len(logprobs)) - 1
    return bool(runs.max() >= rule.window)


def is_gibberish(sample: Sample, rule: Gibberish) -> bool:
    """Return whether a rare token was sampled that the model itself treated as next to impossible.

    Source: the gibberish filter of prime-rl.
    """
    is_rare = sample.loss_mask_T & (sample.token_ids_T > rule.token_id_threshold)
    return bool(np.any(sample.logprobs_T[is_rare] < rule.max_logprob))
