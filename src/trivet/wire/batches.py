"""Defines the batch that crosses from the orchestrator to the trainer: one per step, packed into rows.

`BatchHeader` precedes a batch, and `BatchReply` is the trainer's answer. These two and `Alive` may get optional fields and must not
change otherwise. So two processes with different schemas of `Batch` can still read why the other one refuses. Legend: T tokens of
one row, S samples in it.
"""

from enum import StrEnum

import msgspec
import numpy as np

from trivet.wire.experts import RoutedExperts
from trivet.wire.versions import GroupId, Step, TransferRound

MAGIC = "trivet"
"""Marks a message of this program, in the `magic` field of its header."""


class MicroBatch(msgspec.Struct, kw_only=True):
    """One packed row: whole samples one after the other, which must not attend to each other.

    Every array is aligned with `token_ids_T`: `logprobs_T[t]` is the log-probability with which token t was sampled, given the
    tokens of its sample before it. The first token of a sample follows no other, so it is never trained on.
    """

    token_ids_T: np.ndarray
    """int32 [T]."""
    position_ids_T: np.ndarray
    """int32 [T]: starts at 0 in each sample."""
    loss_mask_T: np.ndarray
    """bool [T]: true on tokens that carry gradient."""
    logprobs_T: np.ndarray
    """float32 [T]: log-probability with which each token was sampled, temperature applied."""
    advantages_T: np.ndarray
    """float32 [T]: the advantage of each token, or of the rollout to which it belongs."""
    temperatures_T: np.ndarray
    """float32 [T]: temperature of the sample to which each token belongs."""
    sequence_lengths_S: np.ndarray
    """int32 [S]: tokens of each sample; the sum is T."""
    teacher_logprobs_T: np.ndarray | None = None
    """float32 [T]: the teacher's log-probability of each token; None when one of the samples has none."""
    experts_S: list[RoutedExperts | None] = []
    """The experts that computed each sample on the server; empty or all None when no sample has any."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the row, prompts included."""
        return len(self.token_ids_T)

    def split(self, values_T: np.ndarray) -> list[np.ndarray]:
        """Split an array over the tokens of the row into one array for each sample."""
        return np.split(values_T, np.cumsum(self.sequence_lengths_S)[:-1])


class BatchPurpose(StrEnum):
    """States what the trainer does with a batch."""

    TRAIN = "train"
    PROBE = "probe"
    """Sent before the first batch: tokens that each server scored under the start policy, one row for each server. The trainer
    compares the scores with its own and trains nothing. Without rows there is nothing to compare."""
    PREEMPT = "stop"
    """Sent instead of a batch when the run is preempted: the trainer commits the step before and ends. If `has_orchestrator_part`
    is set, the orchestrator's part of that checkpoint is on disk."""
    END = "end"
    """Sent instead of a batch when a replay has no recorded groups left. The trainer does as for PREEMPT, and the run is done."""


class Batch(msgspec.Struct, kw_only=True):
    """All rows of one step. The `step` of a probe is the last step already trained: one less than that of the first batch."""

    step: Step
    purpose: BatchPurpose
    micro_batches: list[MicroBatch] = []
    group_ids: list[GroupId] = []
    num_rollouts: int = 0
    has_orchestrator_part: bool = False
    """True when the orchestrator's part of checkpoint `step` is on disk: after this step the trainer writes its own part and
    commits both."""
    served_dtype: str = ""
    """The dtype in which the servers computed the scores of a probe, by torch's name; empty in other batches."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows, prompts included."""
        return sum(row.num_tokens for row in self.micro_batches)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry gradient."""
        return sum(int(np.count_nonzero(row.loss_mask_T)) for row in self.micro_batches)


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the encoded batch that follows it."""

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
    """Sent at intervals while the orchestrator works on the next batch, so that the trainer keeps waiting. It gets no answer."""

    magic: str = MAGIC
    run_id: str
    attempt: int
    acknowledged: Step | None = None
    """The batch whose acknowledgement the orchestrator has just read; None in a message that was sent for no acknowledgement."""
    transfer: TransferRound | None = None
    """A policy that the trainer should send to servers; None in a message that was sent for no transfer."""


class BatchVerdict(StrEnum):
    """States whether a batch was accepted."""

    ACKNOWLEDGED = "acknowledged"
    """The trainer has the batch, or has trained on it already."""
    REFUSED = "refused"
    """The batch will never be accepted, so the sender must not send it again."""


class BatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's answer to one batch."""

    magic: str = MAGIC
    step: Step
    checksum: int
    """Checksum of the batch that it answers, so that a late answer is not treated as the answer to another batch."""
    verdict: BatchVerdict
    reason: str = ""
    """The reason for REFUSED; empty otherwise."""
