"""Turns of a rollout into samples to train on. Pure: tokens in, tokens out.

A turn is what one model request saw and answered. `branching` makes a sample of each turn. `interleaved` continues the last
sample while the next prompt starts with exactly its tokens, and begins a new one where it does not (templates that strip
thinking, or text that tokenises differently): a broken prefix is counted and never trained on as if it were whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trivet.wire.rollouts import Sample
from trivet.wire.versions import VersionRun, join_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    """One per completion token, as sampled."""
    versions: Sequence[VersionRun]
    """Cover the completion tokens."""
    is_truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    samples: list[Sample]
    num_broken_prefixes: int


def to_samples(turns: Sequence[Turn], *, temperature: float, strategy: Literal["interleaved", "branching"]) -> Trajectory:
    """
    Args:
        turns: in order; turns without completion tokens are left out.
        temperature: that the tokens were sampled at.
    """
    chains: list[list[Turn]] = []
    broken = 0
    for turn in turns:
        if not turn.completion_ids:
            continue
        if strategy == "interleaved" and chains:
            if _continues(chains[-1][-1], turn):
                chains[-1].append(turn)
                continue
            broken += 1
        chains.append([turn])
    return Trajectory(samples=[_join(chain, temperature=temperature) for chain in chains], num_broken_prefixes=broken)


def _continues(previous: Turn, turn: Turn) -> bool:
    known = [*previous.prompt_ids, *previous.completion_ids]
    return list(turn.prompt_ids[: len(known)]) == known


def _join(chain: Sequence[Turn], *, temperature: float) -> Sample:
    last = chain[-1]
    token_ids = [*last.prompt_ids, *last.completion_ids]
    loss_mask_T = np.zeros(len(token_ids), dtype=np.bool_)
    logprobs_T = np.zeros(len(token_ids), dtype=np.float32)
    for turn in chain:
        start = len(turn.prompt_ids)
        end = start + len(turn.completion_ids)
        loss_mask_T[start:end] = True
        logprobs_T[start:end] = turn.logprobs
    loss_mask_T[0] = False
    return Sample(
        token_ids_T=np.array(token_ids, dtype=np.int32),
        loss_mask_T=loss_mask_T,
        logprobs_T=logprobs_T,
        versions=join_versions(turn.versions for turn in chain),
        temperature=temperature,
        is_truncated=last.is_truncated,
    )
