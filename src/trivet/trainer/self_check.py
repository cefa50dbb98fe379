"""Checks before the first step that trainer and server give the same tokens the same probability. Called by the RL loop."""

from collections.abc import Sequence

import numpy as np
import torch

from trivet.errors import TrivetError
from trivet.key_names import key_name
from trivet.trainer.losses.terms import mismatch_kl
from trivet.trainer.model.policy_model import PolicyModel, free_gathered, without_dropout
from trivet.trainer.ranks.world import World, sum_over_ranks
from trivet.trainer.rows import plan_rows
from trivet.wire.batches import MicroBatch


def measure_mismatch(model: PolicyModel, rows: Sequence[MicroBatch], world: World) -> float | None:
    """Return the mean mismatch KL over all loss tokens; None when there are none. Collective."""
    if not any(row.loss_mask_T.any() for row in rows):
        return None
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    with torch.no_grad(), without_dropout(model):
        plan = plan_rows(rows, num_ranks=world.size, shares_prefixes=model.shares_prefixes)
        for row in plan.take(world.rank, device=world.device):
            scores = model(row)
            if not row.is_dummy:
                log_ratio_N = scores.logprobs_N - row.sampler_logprobs_N
                totals += torch.stack((mismatch_kl(log_ratio_N).sum(), torch.ones_like(log_ratio_N).sum()))
    free_gathered(model)
    total, count = sum_over_ranks(world, totals).tolist()
    return total / count


def require_agreement(mismatch: float, *, limit: float) -> None:
    """Refuse a mismatch above `limit`.

    Raises:
        TrivetError: the mismatch is above `limit`, or not a number; says what to look at.
    """
    if np.isfinite(mismatch) and mismatch <= limit:
        return
    raise TrivetError(
        f"trainer and inference server disagree: mean mismatch KL {mismatch:.4g} of the self-check is above "
        f"trainer.max_mismatch_kl = {limit:g}. Compare: model.name and tokenizer of both; {key_name('inference.model.dtype')} with "
        f"trainer.model.compute_dtype; {key_name('orchestrator.sampling.temperature')} (top_p, top_k, min_p and penalties must be "
        "off); after a resume, whether the server holds the weights of that step (GET /policy). Raise trainer.max_mismatch_kl "
        "only when the difference is explained"
    )
