"""Checks what a worker answers before the run uses it: a worker runs the code of others, and may be wrong or lie. Pure.

Called by `workers.pool` for every group. `calls` has checked by then that the group is the one that was asked for.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trivet.wire.groups import EnvironmentInfo, GroupRequest
from trivet.wire.rollouts import MAX_REWARD, Rollout, Sample
from trivet.wire.versions import count_tokens

_MAX_LOGPROB = 0.01
"""Log-probabilities are at most 0; servers that compute in half precision return a little more."""

_DTYPES = {"token_ids_T": np.int32, "loss_mask_T": np.bool_, "logprobs_T": np.float32}


class VersionLimit:
    """The newest policy that a server can have served. It is asked for again only when a worker reports a newer one.

    >>> limit = VersionLimit(lambda: latest_version(layout) or 0)
    >>> limit.is_exceeded(7)
    False
    """

    def __init__(self, newest: Callable[[], int] | None = None) -> None:
        """Allow every version where `newest` is None."""
        self._ask = newest
        self._newest = -1

    def is_exceeded(self, version: int) -> bool:
        """Return whether `version` was never published."""
        if self._ask is None or version <= self._newest:
            return False
        self._newest = self._ask()
        return version > self._newest


def find_fault(rollouts: Sequence[Rollout], request: GroupRequest, *, limit: VersionLimit) -> str | None:
    """Return what is wrong with the answer to `request`, as the end of a sentence; None when the run may use it."""
    if len(rollouts) != request.num_rollouts:
        return f"has {len(rollouts)} rollouts, where {request.num_rollouts} were asked for"
    for index, rollout in enumerate(rollouts):
        if rollout.index != index:
            return f"has rollout {rollout.index} in place {index}"
        fault = next(_rollout_faults(rollout), None) or next(
            (fault for sample in rollout.samples for fault in _sample_faults(sample, limit)), None
        )
        if fault is not None:
            return f"has a rollout (index {index}) {fault}"
    return None


def find_info_fault(info: EnvironmentInfo) -> str | None:
    """Return what is wrong with the description of a loaded environment; None when it can be used."""
    if info.num_examples < 0 or info.num_eval_examples < 0:
        return f"says that it has {min(info.num_examples, info.num_eval_examples)} examples"
    if len(info.example_hashes) not in (0, info.num_examples):
        return f"has {len(info.example_hashes)} hashes of {info.num_examples} examples"
    return None


def _rollout_faults(rollout: Rollout) -> Iterator[str]:
    if not abs(rollout.reward) <= MAX_REWARD:
        yield f"with the reward {rollout.reward}"
    for name, value in rollout.scores.items():
        if not math.isfinite(value):
            yield f"with the score {name} = {value}"
    if not all(0 <= spent_s < math.inf for spent_s in (rollout.generation_s, rollout.scoring_s)):
        yield f"that took {rollout.generation_s} s and {rollout.scoring_s} s"
    if rollout.advantage != 0.0 or min(rollout.counted_tokens, rollout.num_turns, rollout.num_retries) < 0:
        yield "with numbers that a worker does not set"


def _sample_faults(sample: Sample, limit: VersionLimit) -> Iterator[str]:
    """Yield faults; the first may be the only one, since later checks need what earlier ones found true."""
    num_tokens = len(sample.token_ids_T)
    for name, dtype in _DTYPES.items():
        array = getattr(sample, name)
        if array.dtype != dtype or array.shape != (num_tokens,):
            yield f"whose {name} has the shape {array.shape} and dtype {array.dtype}, where its {num_tokens} tokens need {dtype}"
            return
    if num_tokens == 0 or sample.token_ids_T.min() < 0 or sample.loss_mask_T[0]:
        yield "whose tokens are none, negative, or trained on from the first"
        return
    highest = sample.logprobs_T.max()
    if not np.isfinite(sample.logprobs_T.min()) or not highest <= _MAX_LOGPROB:
        yield f"with log-probabilities from {sample.logprobs_T.min()} to {highest}"
    if sample.teacher_logprobs_T is not None or not 0.0 <= sample.temperature < math.inf:
        yield f"with the temperature {sample.temperature}, or with a teacher's log-probabilities"
    # The first token of a sample is never trained on, so the model may have sampled one more than the mask has.
    num_unmasked = count_tokens(sample.versions) - sample.num_loss_tokens
    if any(run.length <= 0 for run in sample.versions) or num_unmasked not in (0, 1):
        yield f"that has {sample.num_loss_tokens} sampled tokens and policy versions for {count_tokens(sample.versions)}"
    for run in sample.versions:
        if run.version < 0 or limit.is_exceeded(run.version):
            yield f"sampled from policy {run.version}, which was never published"
