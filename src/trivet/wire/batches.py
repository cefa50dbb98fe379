"""Defines the batch that crosses from the orchestrator to the trainer: one per step, packed into rows.

Around it are the header in front of a batch and the trainer's answer. These two, and `Alive`, never change but for fields that may
be left out, so that every schema can say to every other why it refuses. Legend: T tokens of one row, S samples in it.
"""

from enum import StrEnum

import msgspec
import numpy as np

from trivet.wire.versions import GroupId, Step

MAGIC = "trivet"


class MicroBatch(msgspec.Struct, kw_only=True):
    """One packed row: whole samples one behind the other, which must not attend to each other.

    Every array is aligned with `token_ids_T`: `logprobs_T[t]` is the sampler's log-probability of token t given the tokens
    of its sample before it. The first token of a sample is predicted by nothing and never trained on.
    """

    token_ids_T: np.ndarray
    """int32 [T]."""
    position_ids_T: np.ndarray
    """int32 [T]: starts again at 0 with each sample."""
    loss_mask_T: np.ndarray
    """bool [T]."""
    logprobs_T: np.ndarray
    """float32 [T]: the sampler's, temperature applied."""
    advantages_T: np.ndarray
    """float32 [T]: the rollout's advantage on each of its tokens."""
    temperatures_T: np.ndarray
    """float32 [T]."""
    sequence_lengths_S: np.ndarray
    """int32 [S]: sums to T."""
    teacher_logprobs_T: np.ndarray | None = None
    """float32 [T]: a teacher's; None when one of the samples has none."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the row, prompts included."""
        return len(self.token_ids_T)

    def split(self, values_T: np.ndarray) -> list[np.ndarray]:
        """Return the values of each sample."""
        return np.split(values_T, np.cumsum(self.sequence_lengths_S)[:-1])


class BatchPurpose(StrEnum):
    """States what the trainer does with a batch."""

    TRAIN = "train"
    PROBE = "probe"
    """Sent before the first batch: tokens that each server scored under the start policy, a row a server. The trainer compares them
    with its own scores and trains nothing. Without rows there is nothing to compare."""
    PREEMPT = "stop"
    """Sent instead of a batch when the run is preempted: the trainer commits the step before, and ends. The other part of that
    checkpoint is on disk if `has_orchestrator_part`."""
    END = "end"
    """Sent instead of a batch when a replay has used up its record: the trainer does the same, and the run is done."""


class Batch(msgspec.Struct, kw_only=True):
    """All rows of one step. A probe carries the step that the first batch will have, less one."""

    step: Step
    purpose: BatchPurpose
    micro_batches: list[MicroBatch] = []
    group_ids: list[GroupId] = []
    num_rollouts: int = 0
    has_orchestrator_part: bool = msgspec.field(default=False, name="has_orchestrator_half")
    """The orchestrator's part of checkpoint `step` is on disk: the trainer writes its own after this step and commits both.
    Encoded, the field keeps its first name, under which recorded batches have it."""
    served_dtype: str = ""
    """The dtype in which servers computed the scores of a probe; empty in other batches."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows, prompts included."""
        return sum(row.num_tokens for row in self.micro_batches)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry gradient."""
        return sum(int(np.count_nonzero(row.loss_mask_T)) for row in self.micro_batches)


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
