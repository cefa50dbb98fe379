"""Defines the messages of a transfer in memory: who takes part, and which tensors follow."""

import msgspec

from trivet.wire.versions import PolicyVersion


class TransferRound(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's way from the trainer, which has rank 0 of the group, to the workers of the servers that take part."""

    version: PolicyVersion
    group_id: str
    """Names the connections that are used. A round with the id of the round before uses its connections again."""
    host: str
    """The address at which the ranks of the group find each other: a store that one of the servers opened."""
    port: int
    world_size: int
    """Ranks of the group: the trainer, and every worker of every server that takes part."""
    timeout_s: float
    """Longest time for the ranks to connect, and for one exchange afterwards."""
    rank_offset: int = 0
    """The rank of the receiver's first worker; 0 for the trainer."""


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a policy, as its checkpoint names it."""

    name: str
    dtype: str
    """The dtype by torch's name."""
    shape: list[int]


class TransferHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's answer to a round, sent over the group before the tensors."""

    version: PolicyVersion
    refusal: str = ""
    """Why no tensors follow; empty if they do."""
    tensors: list[TensorInfo] = []
