from pathlib import Path

import msgspec
import numpy as np
import pytest

from trivet.config.layout import RunLayout
from trivet.errors import BatchError
from trivet.transport.recording import (
    RecordedBatch,
    RecordingReceiver,
    ReplayReceiver,
    read_recorded,
    record_batch,
    recorded_steps,
)
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.codec import SCHEMA_VERSION, decode, encode
from trivet.wire.versions import GroupId, Step


def make_batch(step: int, *, purpose: BatchPurpose = BatchPurpose.TRAIN) -> Batch:
    row = MicroBatch(
        token_ids_T=np.arange(4, dtype=np.int32) + step,
        position_ids_T=np.arange(4, dtype=np.int32),
        loss_mask_T=np.array([False, True, True, True]),
        logprobs_T=np.full(4, -0.5, dtype=np.float32),
        advantages_T=np.full(4, 0.25, dtype=np.float32),
        temperatures_T=np.ones(4, dtype=np.float32),
        sequence_lengths_S=np.array([4], dtype=np.int32),
    )
    return Batch(
        step=Step(step),
        purpose=purpose,
        micro_batches=[row],
        group_ids=[GroupId(step)],
        num_rollouts=2,
        has_orchestrator_part=True,
    )


class Received:
    """A BatchReceiver that has all its batches from the start."""

    def __init__(self) -> None:
        self.is_closed = False

    def receive(self, step: Step) -> Batch:
        return make_batch(step, purpose=BatchPurpose.TRAIN if step else BatchPurpose.PROBE)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


def test_what_is_received_is_kept_and_replayed_without_the_other_runs_part(layout: RunLayout) -> None:
    inner = Received()
    receiver = RecordingReceiver(inner, layout=layout)
    received = [receiver.receive(Step(step)) for step in range(4)]
    receiver.close()
    assert inner.is_closed
    assert recorded_steps(layout) == [1, 2, 3]
    replayed = ReplayReceiver(layout.root, from_step=Step(0))
    check = replayed.receive(Step(0))
    assert (check.purpose, check.micro_batches) == (BatchPurpose.PROBE, [])
    for step in (1, 2, 3):
        batch = replayed.receive(Step(step))
        assert not batch.has_orchestrator_part
        assert encode(msgspec.structs.replace(batch, has_orchestrator_part=True)) == encode(received[step])


def test_equal_batches_are_equal_files(layout: RunLayout, tmp_path: Path) -> None:
    other = RunLayout(tmp_path / "other")
    for target in (layout, other):
        record_batch(target, make_batch(5))
    assert layout.recorded_batch(5).read_bytes() == other.recorded_batch(5).read_bytes()


def test_a_batch_that_was_not_recorded_is_named_with_those_that_were(layout: RunLayout) -> None:
    with pytest.raises(BatchError, match=r"batch 1 was not recorded in .*, which holds none"):
        read_recorded(layout, Step(1))
    for step in (1, 2):
        record_batch(layout, make_batch(step))
    with pytest.raises(BatchError, match=r"batch 3 .* holds steps 1 to 2; lower max_steps"):
        read_recorded(layout, Step(3))


def test_a_damaged_or_foreign_recording_is_refused(layout: RunLayout) -> None:
    record_batch(layout, make_batch(1))
    path = layout.recorded_batch(1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BatchError, match="the file was altered"):
        read_recorded(layout, Step(1))
    path.write_bytes(whole[:20])
    with pytest.raises(BatchError, match="cannot be read"):
        read_recorded(layout, Step(1))
    recorded = decode(whole, RecordedBatch)
    path.write_bytes(encode(msgspec.structs.replace(recorded, schema=SCHEMA_VERSION + 1)))
    with pytest.raises(BatchError, match=rf"has schema {SCHEMA_VERSION + 1}, this version reads {SCHEMA_VERSION}"):
        read_recorded(layout, Step(1))
