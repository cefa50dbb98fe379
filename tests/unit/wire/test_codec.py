"""Decoding returns what was encoded. Damaged bytes raise MessageRefused and nothing else."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.errors import MessageRefused
from trivet.wire.batches import Batch, BatchHeader, BatchPurpose, BatchReply, BatchVerdict, MicroBatch
from trivet.wire.codec import decode, encode
from trivet.wire.rollouts import Group, Rollout, Sample
from trivet.wire.versions import VersionRun


def make_row(num_tokens=6):
    return MicroBatch(
        token_ids_T=np.arange(num_tokens, dtype=np.int32),
        position_ids_T=np.arange(num_tokens, dtype=np.int32),
        loss_mask_T=np.arange(num_tokens) % 2 == 1,
        logprobs_T=np.linspace(-3, 0, num_tokens, dtype=np.float32),
        advantages_T=np.ones(num_tokens, dtype=np.float32),
        temperatures_T=np.ones(num_tokens, dtype=np.float32),
        sequence_lengths_S=np.array([num_tokens], dtype=np.int32),
        teacher_logprobs_T=np.linspace(-2, 0, num_tokens, dtype=np.float32),
    )


def make_batch():
    return Batch(step=3, purpose=BatchPurpose.TRAIN, micro_batches=[make_row(), make_row(4)], group_ids=[5, 6], num_rollouts=2)


def make_group():
    sample = Sample(
        token_ids_T=np.array([1, 2, 3], dtype=np.int32),
        loss_mask_T=np.array([False, True, True]),
        logprobs_T=np.array([0, -0.5, -1.5], dtype=np.float32),
        versions=[VersionRun(4, 1), VersionRun(5, 1)],
        temperature=0.7,
    )
    rollout = Rollout(
        index=1,
        reward=0.5,
        samples=[sample],
        scores={"lcs": 0.5},
        prompt=[{"role": "user", "content": "héllo"}],
        completion=[{"role": "assistant", "tool_calls": [{"id": None, "n": 1.5}]}],
    )
    return Group(group_id=9, env="reverse-text", example_id=4, rollouts=[rollout])


@pytest.mark.parametrize("make", [make_batch, make_group])
def test_a_struct_is_the_same_bytes_after_a_round_trip(make):
    sent = make()
    data = encode(sent)
    assert encode(decode(data, type(sent))) == data


def test_every_field_of_a_group_survives():
    group = decode(encode(make_group()), Group)
    (rollout,) = group.rollouts
    (sample,) = rollout.samples
    assert (group.oldest_version, group.newest_version) == (4, 5)
    assert sample.versions == [VersionRun(4, 1), VersionRun(5, 1)]
    assert rollout.prompt == make_group().rollouts[0].prompt
    assert rollout.completion == make_group().rollouts[0].completion
    assert not rollout.is_truncated
    np.testing.assert_array_equal(sample.logprobs_T, np.array([0, -0.5, -1.5], dtype=np.float32))
    np.testing.assert_array_equal(group.rewards, np.array([0.5]))
    assert group.rewards.dtype == np.float64


def round_trip(array):
    return decode(encode(Rows(array)), MicroBatch).token_ids_T


def Rows(array):  # noqa: N802  a MicroBatch in which only one array matters
    row = make_row()
    row.token_ids_T = array
    return row


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int32)[::3],
        np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        np.arange(4, dtype=">i4"),
        np.zeros((0,), dtype=np.float32),
        np.zeros((3, 0), dtype=np.int64),
        np.array(7, dtype=np.int64),
        np.array([True, False]),
        np.array([1, 255], dtype=np.uint8),
        np.array([np.nan, np.inf, -0.0], dtype=np.float32),
    ],
    ids=["strided", "fortran", "big-endian", "empty", "empty-2d", "scalar", "bool", "uint8", "special floats"],
)
def test_arrays_keep_shape_kind_and_every_value(array):
    found = round_trip(array)
    assert found.shape == array.shape
    assert found.dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(found, array)


def test_arrays_are_read_as_views_of_the_message():
    data = encode(make_batch())
    batch = decode(data, Batch)
    whole = np.frombuffer(data, dtype=np.uint8)
    assert all(
        np.shares_memory(getattr(row, name), whole)
        for row in batch.micro_batches
        for name in MicroBatch.__struct_fields__
        if name != "experts_S"
    )
    assert not batch.micro_batches[0].token_ids_T.flags.writeable


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.complex64, "U3", object])
def test_a_kind_of_array_that_readers_refuse_is_not_written(dtype):
    with pytest.raises(TypeError, match="cannot be encoded"):
        encode(Rows(np.zeros(2, dtype=dtype)))


def test_a_message_of_another_kind_is_refused_with_both_names():
    with pytest.raises(MessageRefused, match="are not a Batch of schema 1"):
        decode(encode(BatchReply(step=1, checksum=2, verdict=BatchVerdict.REFUSED)), Batch)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    for kind in (Batch, Group, BatchHeader, BatchReply):
        with pytest.raises(MessageRefused):
            decode(data, kind)


@given(st.data())
def test_altered_bytes_give_a_batch_or_a_refusal(data):
    message = bytearray(encode(make_batch()))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MessageRefused):
        decode(bytes(message), Batch)


def test_truncated_bytes_are_refused_at_every_length():
    message = encode(make_batch())
    for length in range(len(message)):
        with pytest.raises(MessageRefused):
            decode(message[:length], Batch)


def test_nesting_without_end_is_refused():
    message = encode(make_row())
    name = b"token_ids_T"
    start = message.index(name) + len(name)
    with pytest.raises(MessageRefused):
        decode(message[:start] + b"\x91" * 100_000, MicroBatch)
