"""Defines policy versions, steps and group ids, a policy's status on a server and ways there, and run-length codes for versions.

Policy version N is the weights after optimizer step N; version 0 is the start model. Batch n is trained in step n (from 1).
"""

from collections.abc import Iterable, Sequence
from typing import NewType

import msgspec

PolicyVersion = NewType("PolicyVersion", int)
Step = NewType("Step", int)
GroupId = NewType("GroupId", int)
"""The sampler hands out ids in ascending order, each once in a run. A group that is dispatched again keeps its id."""

START_VERSION = PolicyVersion(0)


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that a server serves."""

    version: PolicyVersion
    digest: str
    """Digest in the manifest of the weights directory; for version 0, the digest of the start model's weight files."""
    probe_mismatch: float | None = None
    """Mean difference, in nats, between the server's and the trainer's log-probabilities of the policy's probe; None for a policy
    without a probe."""
    probe_limit: float | None = None
    """The largest mean difference that rounding explains, in nats; None for a policy without a probe."""
    dtype: str = ""
    """The dtype that the server computes in, by torch's name."""
    asleep: bool = False
    """True while the server answers no completion. It answers again once it has loaded a policy, the same or another."""
    is_fetching: bool = False
    """True while the server fetches a policy. If a request to load one is answered so, it must be sent again."""
    source: str = "files"
    """Where the policy came from: `files`, or the trainer's memory by `nccl` or `gloo`."""
    num_workers: int = 0
    """Workers that can receive policies from the trainer's memory; 0: none can."""
    transfer_port: int = 0
    """The port on the server's host at which the ranks of such a transfer can find each other; 0: none."""


class FetchablePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A published policy, and the sources from which an inference server can fetch it."""

    version: PolicyVersion
    digest: str
    """Digest in the manifest of the policy."""
    manifest_sha256: str
    """SHA-256 of the bytes of manifest.json, which has the probe too. The digest covers the files alone."""
    sources: tuple[str, ...]
    """Addresses. The first is the origin's, which has every published policy. The others may have it already, or get it later."""


class TransferRound(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's way from the trainer, which has rank 0 of a group, to the workers of the servers that take part."""

    version: PolicyVersion
    digest: str
    """Digest in the manifest of the policy."""
    group_id: str
    """Names the round's connections. No other round has it, so what an earlier one left in the store is not read."""
    host: str
    """The address at which the ranks of the group find each other: a store that one of the servers opened."""
    port: int
    world_size: int
    """Ranks of the group: the trainer, and every worker of every server that takes part."""
    timeout_s: float
    """Longest time for the ranks to connect, and for one exchange afterwards."""
    rank_offset: int = 0
    """The rank of the receiver's first worker; 0 for the trainer."""


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` consecutive tokens sampled from policy `version`."""

    version: PolicyVersion
    length: int


def join_versions(parts: Iterable[Sequence[VersionRun]]) -> list[VersionRun]:
    """Concatenate encoded versions. Neighbouring runs of the same version are merged."""
    joined: list[VersionRun] = []
    for part in parts:
        for run in part:
            if joined and joined[-1].version == run.version:
                joined[-1] = VersionRun(run.version, joined[-1].length + run.length)
            elif run.length:
                joined.append(run)
    return joined


def first_versions(runs: Iterable[VersionRun], num_tokens: int) -> list[VersionRun]:
    """Return the encoded versions of the first `num_tokens` tokens."""
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
