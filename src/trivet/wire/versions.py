"""Defines policy versions, steps and ids of groups, and encodes the versions of tokens by run length.

Policy version N is the weights after optimizer step N; version 0 is the start model. Batch n is trained in step n (from 1).
"""

from collections.abc import Iterable, Sequence
from typing import NewType

import msgspec

PolicyVersion = NewType("PolicyVersion", int)
Step = NewType("Step", int)
GroupId = NewType("GroupId", int)
"""Handed out by the sampler in order, never twice in a run. It survives a resume: a group dispatched again keeps its id."""

START_VERSION = PolicyVersion(0)


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` consecutive tokens sampled from policy `version`."""

    version: PolicyVersion
    length: int


def join_versions(parts: Iterable[Sequence[VersionRun]]) -> list[VersionRun]:
    """Concatenate encodings; neighbouring runs of the same version are merged."""
    joined: list[VersionRun] = []
    for part in parts:
        for run in part:
            if joined and joined[-1].version == run.version:
                joined[-1] = VersionRun(run.version, joined[-1].length + run.length)
            elif run.length:
                joined.append(run)
    return joined


def first_versions(runs: Iterable[VersionRun], num_tokens: int) -> list[VersionRun]:
    """Return the encoding of the first `num_tokens` tokens."""
    kept: list[VersionRun] = []
    for run in runs:
        if num_tokens <= 0:
            break
        kept.append(VersionRun(run.version, min(run.length, num_tokens)))
        num_tokens -= run.length
    return kept


def count_tokens(runs: Iterable[VersionRun]) -> int:
    """Return the number of tokens that the runs cover."""
    return sum(run.length for run in runs)
