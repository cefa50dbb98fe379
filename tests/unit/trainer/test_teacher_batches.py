"""Follow a teacher's log-probabilities from a sample to the loss, and read batches that were recorded without them."""

import msgspec
import numpy as np
import pytest
import torch

from trivet.algorithms.packing import PackItem, pack, truncate
from trivet.errors import BatchError
from trivet.trainer.loop import check_batch
from trivet.trainer.rows import to_tensors
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.codec import decode, encode
from trivet.wire.rollouts import Sample
from trivet.wire.versions import PolicyVersion, Step, VersionRun


def make_sample(length: int, *, teacher: float | None) -> Sample:
    """Make a sample in which the teacher's value of token t is `teacher` + t / 100."""
    positions = np.arange(length, dtype=np.float32)
    return Sample(
        token_ids_T=np.arange(length, dtype=np.int32),
        loss_mask_T=np.arange(length) >= 2,
        logprobs_T=-positions,
        teacher_logprobs_T=None if teacher is None else teacher + positions / 100,
        versions=[VersionRun(PolicyVersion(0), max(length - 2, 0))],
        temperature=1.0,
    )


def make_batch(*teachers: float | None) -> Batch:
    items = [PackItem(sample=make_sample(4 + i, teacher=teacher), advantage=1.0) for i, teacher in enumerate(teachers)]
    return Batch(
        step=Step(3),
        purpose=BatchPurpose.TRAIN,
        micro_batches=pack(items, seq_len=64),
        group_ids=[],
        num_rollouts=len(teachers),
    )


def test_each_loss_token_keeps_its_value_over_packing_and_the_wire():
    batch = decode(encode(make_batch(-1.0, -2.0)), Batch)
    row = to_tensors(batch.micro_batches[0], device=torch.device("cpu"))
    assert row.teacher_logprobs_N is not None
    torch.testing.assert_close(row.teacher_logprobs_N, torch.tensor([-1.98, -1.97, -1.96, -0.98, -0.97]))
    assert make_batch(-1.0, None).micro_batches[0].teacher_logprobs_T is None, "one of the samples has none"


def test_what_is_cut_off_a_sample_is_cut_off_its_values():
    cut = truncate(make_sample(9, teacher=-1.0), seq_len=5)
    assert cut.teacher_logprobs_T is not None
    assert len(cut.teacher_logprobs_T) == cut.num_tokens == 5


def test_a_batch_recorded_before_there_were_teachers_loads_and_is_refused_where_one_is_needed():
    class OldRow(msgspec.Struct, kw_only=True):
        token_ids_T: np.ndarray
        position_ids_T: np.ndarray
        loss_mask_T: np.ndarray
        logprobs_T: np.ndarray
        advantages_T: np.ndarray
        temperatures_T: np.ndarray
        sequence_lengths_S: np.ndarray

    batch = make_batch(-1.0)
    new = batch.micro_batches[0]
    old = decode(encode(OldRow(**{name: getattr(new, name) for name in OldRow.__struct_fields__})), MicroBatch)
    batch.micro_batches = [old]
    check_batch(batch, seq_len=64, vocab_size=100)
    with pytest.raises(BatchError, match=r"batch 3 has no teacher log-probabilities.*set orchestrator\.teacher_model"):
        check_batch(batch, seq_len=64, vocab_size=100, needs_teacher=True)
