"""Checks the shape and the numbers of a group's rollouts as they come from a worker. `calls` has checked the id by then. Pure."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from trivet.wire.groups import GroupRequest
from trivet.wire.rollouts import Rollout, Sample
from trivet.wire.versions import count_tokens

_DTYPES = {"token_ids_T": np.int32, "loss_mask_T": np.bool_, "logprobs_T": np.float32}


def find_fault(rollouts: Sequence[Rollout], request: GroupRequest) -> str | None:
    """Return what is wrong with the answer to `request`, as the end of a sentence; None when the run may use it."""
    if [rollout.index for rollout in rollouts] != list(range(request.num_rollouts)):
        return f"has {len(rollouts)} rollouts, where {request.num_rollouts} in order were asked for"
    for rollout in rollouts:
        for fault in _rollout_faults(rollout):
            return f"has a rollout (index {rollout.index}) {fault}"
    return None


def _rollout_faults(rollout: Rollout) -> Iterator[str]:
    for name, value in {"reward": rollout.reward, **rollout.scores}.items():
        if not math.isfinite(value):
            yield f"with {name} = {value}"
    for sample in rollout.samples:
        yield from _sample_faults(sample)


def _sample_faults(sample: Sample) -> Iterator[str]:
    num_tokens = len(sample.token_ids_T)
    for name, dtype in _DTYPES.items():
        array = getattr(sample, name)
        if array.dtype != dtype or array.shape != (num_tokens,):
            yield f"whose {name} has the shape {array.shape} and dtype {array.dtype}, where its {num_tokens} tokens need {dtype}"
            return
    # The first token of a sample is never trained on, so the model may have sampled one more than the mask has.
    if count_tokens(sample.versions) - sample.num_loss_tokens not in (0, 1):
        yield f"that has {sample.num_loss_tokens} sampled tokens and policy versions for {count_tokens(sample.versions)}"
    if not np.isfinite(sample.logprobs_T).all():
        yield "with log-probabilities that are no numbers"
