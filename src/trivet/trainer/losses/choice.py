"""Chooses the tokens that `clip_cov` and `kl_cov` treat differently: those whose update would lower the entropy most.

The choice is made over the whole step before any row is computed, so it does not depend on rows or ranks. The source takes the
trainer's log-probabilities, which are known only after a forward of all rows. Here they are the sampler's, which on policy are the
same. Called by `trainer.step` and `trainer.token_shares`. Legend: N loss tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trivet.config.schema.losses import ClipCovLossConfig, KlCovLossConfig
from trivet.trainer.device_copies import to_device
from trivet.trainer.rows import RowTensors, SampleIndex
from trivet.wire.batches import MicroBatch

CovLossConfig = ClipCovLossConfig | KlCovLossConfig


def mark_chosen(config: CovLossConfig, batch: Sequence[MicroBatch], rows: Sequence[RowTensors]) -> list[RowTensors]:
    """Return a rank's own `rows` with `chosen_N`. `batch` has all rows of the step."""
    chosen = choose_tokens(config, batch)
    return [
        row
        if row.is_dummy
        else replace(row, chosen_N=to_device(np.concatenate([chosen[key] for key in row.sample_indices]), row.targets_N.device))
        for row in rows
    ]


def choose_tokens(config: CovLossConfig, batch: Sequence[MicroBatch]) -> dict[SampleIndex, np.ndarray]:
    """Return which loss tokens of each sample of the step are chosen, bool.

    cov = (A - mean A) * (logprob - mean logprob), with means over the step. `kl_cov` takes the share `cov_ratio` with the highest,
    and all that are equal to the lowest of these. `clip_cov` takes as many of those between `cov_low` and `cov_high`, at equal
    distances in the order of cov. (The source draws them at random.) Of tokens with the same cov, the batch's order decides.

    Source: arXiv 2505.22617, section 4.2.
    """
    masks = {(i, n): mask for i, row in enumerate(batch) for n, mask in enumerate(row.split(row.loss_mask_T))}
    advantages_N, logprobs_N = (
        np.concatenate([column[row.loss_mask_T] for row, column in zip(batch, columns, strict=True)]).astype(np.float64)
        for columns in ([row.advantages_T for row in batch], [row.logprobs_T for row in batch])
    )
    # The mean of sorted numbers does not depend on how samples are packed.
    cov_N = (advantages_N - np.sort(advantages_N).mean()) * (logprobs_N - np.sort(logprobs_N).mean())
    count = max(1, int(config.cov_ratio * len(cov_N)))
    if isinstance(config, KlCovLossConfig):
        chosen_N = cov_N >= np.partition(cov_N, -count)[-count]
    else:
        candidates = np.flatnonzero((cov_N > config.cov_low) & (cov_N < config.cov_high))
        candidates = candidates[np.argsort(cov_N[candidates], kind="stable")]
        count = min(count, len(candidates))
        picked = (np.arange(count) + 0.5) * len(candidates) / max(count, 1)
        chosen_N = np.isin(np.arange(len(cov_N)), candidates[picked.astype(int)])
    ends = np.cumsum([np.count_nonzero(mask) for mask in masks.values()])
    return dict(zip(masks, np.split(chosen_N, ends[:-1]), strict=True))
