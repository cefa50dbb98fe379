"""Defines the probe of a policy: log-probabilities of fixed tokens as the trainer computes them, which every server must reproduce.

The trainer writes the probe into the manifest of each policy. A server that has loaded the policy computes the log-probabilities of
the same tokens with the engine that samples, and serves the policy only if both agree. This finds files that are whole but not what
was trained, a tensor that the engine did not replace, and a setting that only one side has, at the first load that is affected.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from trivet.errors import WeightsError

ProbeDtype = Literal["float32", "float16", "bfloat16"]

MAX_MEAN_DIFFERENCE: dict[ProbeDtype, float] = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.2}
"""The largest mean of |difference|, in nats, that rounding explains if the less precise side computes in this dtype. Measured with
SmolLM2 (30 layers) between the trainer and vLLM on a CPU: 1.4e-5 in float32 and 0.056 in bfloat16. Numbers of float16 are eight
times as dense as those of bfloat16. The limit of float32 allows for a token that rounding sends to another expert."""
_NUM_LISTED = 3
"""Tokens that a message lists."""


class ProbeSample(msgspec.Struct, frozen=True):
    """The beginning of a conversation of the run, or a part of one."""

    token_ids: list[int]
    """At least two tokens."""
    logprobs: list[float]
    """Log-probability in nats, at temperature 1, of each token but the first given those before it."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a run, with the log-probabilities that its trainer computes for them under one policy."""

    dtype: ProbeDtype
    """The dtype that the trainer computes in."""
    samples: list[ProbeSample]

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each sample."""
        return [sample.token_ids for sample in self.samples]

    @property
    def num_scored(self) -> int:
        """Tokens that have a log-probability."""
        return sum(len(sample.logprobs) for sample in self.samples)


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """How far a server's log-probabilities of a probe are from the trainer's."""

    mismatch: float
    """Mean of |difference| over the scored tokens, in nats."""
    limit: float
    """The largest `mismatch` that rounding explains."""


def convert_dtype(name: str) -> ProbeDtype:
    """Return the dtype of a probe whose name is `name`; refuse a dtype without a limit."""
    if name in MAX_MEAN_DIFFERENCE:
        return name
    raise WeightsError(f"no limit is known for a probe in {name}: use one of {', '.join(MAX_MEAN_DIFFERENCE)}")


def cut_samples(conversations: Sequence[Sequence[int]], *, num_tokens: int) -> list[list[int]]:
    """Choose the tokens of a probe from conversations of the run, at most `num_tokens` over all samples.

    A conversation that is too long, above half of `num_tokens`, is cut to its first token, which models expect at the beginning,
    and its last tokens.
    """
    max_length, num_left = max(num_tokens // 2, 2), num_tokens
    samples: list[list[int]] = []
    for ids in conversations:
        length = min(len(ids), max_length, num_left)
        if length >= 2:
            samples.append(list(ids) if length == len(ids) else [ids[0], *ids[-(length - 1) :]])
            num_left -= length
    return samples


def compare(probe: Probe, found: Sequence[Sequence[float]], *, dtype: ProbeDtype, where: str) -> ProbeResult:
    """Compare the log-probabilities in `probe` with those of another process; refuse a difference that rounding does not explain.

    Args:
        found: the log-probabilities of the other process, in the shape of those in the samples.
        dtype: the dtype in which the other process computes.
        where: the policy and the other process, for the message.

    Raises:
        WeightsError: the mean difference is above the limit, or the shapes differ.
    """
    expected_N = np.concatenate([sample.logprobs for sample in probe.samples])
    found_N = np.concatenate([np.asarray(values, dtype=np.float64) for values in found])
    if found_N.shape != expected_N.shape:
        raise WeightsError(f"{where} scored {len(found_N)} of the {len(expected_N)} tokens of its probe")
    differences_N = np.abs(found_N - expected_N)
    limit = max(MAX_MEAN_DIFFERENCE[probe.dtype], MAX_MEAN_DIFFERENCE[dtype])
    result = ProbeResult(mismatch=float(differences_N.mean()), limit=limit)
    if result.mismatch <= limit:  # false for NaN
        return result
    # The sample of each scored token, and the token's position in it.
    positions = [(number, k) for number, sample in enumerate(probe.samples) for k in range(1, len(sample.token_ids))]
    worst = [int(index) for index in np.argsort(-np.nan_to_num(differences_N, nan=np.inf))[:_NUM_LISTED]]
    tokens = "; ".join(
        f"token {probe.samples[number].token_ids[k]} at position {k} of sample {number}: trainer {expected_N[index]:.5g}, server "
        f"{found_N[index]:.5g}"
        for index in worst
        for number, k in [positions[index]]
    )
    raise WeightsError(
        f"{where} is not the policy that the trainer computes with: log-probabilities of its probe differ by {result.mismatch:.3g} "
        f"nats on average over {len(expected_N)} tokens; rounding explains {limit:g} ({tokens}). Compare what the two sides were "
        f"given: the model's files and config.json, rope_scaling, the dtypes (trainer {probe.dtype}, server {dtype}), vllm_args; "
        "weights.probe_tokens = 0 compares nothing"
    )
