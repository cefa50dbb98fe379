"""Keeps batches on disk as they were trained, and feeds them to the trainer again without an orchestrator or servers.

`batches/step_N.msgpack` holds the bytes that crossed to the trainer and nothing of which run or attempt they were of, so equal
batches are equal files.
"""

import zlib
from pathlib import Path

import msgspec

from trivet.config.layout import BATCH_SUFFIX, RunLayout
from trivet.errors import BatchError, MessageRefused
from trivet.key_names import key_name
from trivet.step_directories import discard_after, list_steps
from trivet.storage.durable import write_atomically
from trivet.transport.messages import BatchReceiver
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.codec import SCHEMA_VERSION, decode, encode
from trivet.wire.versions import Step


class RecordedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The content of batches/step_N.msgpack."""

    schema: int
    """`codec.SCHEMA_VERSION` of the writer."""
    checksum: int
    """CRC-32 of the payload."""
    payload: bytes
    """An encoded `wire.batches.Batch`."""


def record_batch(layout: RunLayout, batch: Batch) -> None:
    """Write the batch, and return once it is on disk."""
    payload = encode(batch)
    recorded = RecordedBatch(schema=SCHEMA_VERSION, checksum=zlib.crc32(payload), payload=payload)
    write_atomically(layout.recorded_batch(batch.step), encode(recorded))


def recorded_steps(layout: RunLayout) -> list[Step]:
    """Return the steps whose batches are on disk, oldest first."""
    return [Step(step) for step in list_steps(layout.batches, suffix=BATCH_SUFFIX)]


def discard_recorded_after(layout: RunLayout, step: Step) -> None:
    """Remove batches that a run which goes back to `step` receives again."""
    discard_after(layout.batches, step, suffix=BATCH_SUFFIX)


def read_recorded(layout: RunLayout, step: Step) -> Batch:
    """Return the batch of `step` as it was trained.

    Raises:
        BatchError: it was not recorded, by another schema, or is damaged.
    """
    path = layout.recorded_batch(step)
    try:
        recorded = decode(path.read_bytes(), RecordedBatch)
        if recorded.schema != SCHEMA_VERSION:
            raise BatchError(
                f"{path} has schema {recorded.schema}, this version reads {SCHEMA_VERSION}: replay it with its own"
            )
        if zlib.crc32(recorded.payload) != recorded.checksum:
            raise BatchError(f"{path} does not match its checksum: the file was altered")
        return decode(recorded.payload, Batch)
    except FileNotFoundError as exc:
        raise BatchError(
            f"batch {step} was not recorded in {layout.batches}, which holds {describe_steps(recorded_steps(layout))}; "
            f"lower {key_name('max_steps')}"
        ) from exc
    except MessageRefused as exc:
        raise BatchError(f"{path} cannot be read: {exc}") from exc


def describe_steps(steps: list[Step]) -> str:
    """Return `steps 1 to 9`, or `none`."""
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"


class RecordingReceiver:
    """A BatchReceiver that keeps what another receives, if it is trained on."""

    def __init__(self, receiver: BatchReceiver, *, layout: RunLayout) -> None:
        self._receiver = receiver
        self._layout = layout
        self.close = receiver.close

    def receive(self, step: Step) -> Batch:
        """Receive a batch, and record it if it is trained on."""
        batch = self._receiver.receive(step)
        if batch.purpose is BatchPurpose.TRAIN:
            record_batch(self._layout, batch)
        return batch


class ReplayReceiver:
    """A BatchReceiver over the batches that the run in `root` recorded, after an empty probe."""

    def __init__(self, root: Path, *, from_step: Step) -> None:
        """Read nothing yet.

        Args:
            from_step: the last step done; its batch is asked for first, and is the probe's.
        """
        self._layout = RunLayout(root)
        self._from_step = from_step

    def receive(self, step: Step) -> Batch:
        """Return the recorded batch of `step`."""
        if step == self._from_step:
            return Batch(step=step, purpose=BatchPurpose.PROBE)
        # The recorded run's orchestrator wrote its part of that run's checkpoint, not of this one's.
        return msgspec.structs.replace(read_recorded(self._layout, step), has_orchestrator_part=False)

    def close(self) -> None:
        """Do nothing: no file stays open."""
