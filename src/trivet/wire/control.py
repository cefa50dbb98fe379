"""Defines the messages around a batch: the header in front of it, and the trainer's answer.

These structs never change but for fields that may be left out, so that every schema can say to every other why it refuses.
"""

from enum import StrEnum

import msgspec

from trivet.wire.versions import Step

MAGIC = "trivet"


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the payload that follows it."""

    magic: str = MAGIC
    schema: int
    """`codec.SCHEMA_VERSION` of the sender."""
    run_id: str
    attempt: int
    """Counts the starts of the run: a process left over from an earlier one is refused."""
    step: Step
    num_bytes: int
    """Length of the payload, an encoded `wire.batches.Batch`."""
    checksum: int
    """CRC-32 of the payload."""


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """The orchestrator is well and still at work on the next batch. Not answered."""

    magic: str = MAGIC
    run_id: str
    attempt: int
    acknowledged: Step | None = None
    """The batch whose acknowledgement it has just read; None when it has read none since it last said so."""


class BatchVerdict(StrEnum):
    """States whether a batch was accepted."""

    ACKNOWLEDGED = "acknowledged"
    """The batch is held, or was delivered before."""
    REFUSED = "refused"
    """It will never be accepted; sending it again is useless."""


class BatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's answer to one batch."""

    magic: str = MAGIC
    step: Step
    checksum: int
    """Checksum of the batch it answers, so that a late answer is not treated as another's."""
    verdict: BatchVerdict
    reason: str = ""
