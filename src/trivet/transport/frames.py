"""Turns a batch into frames, a header and parts of the payload, and checks them before anything is decoded. Pure."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from trivet.config.schema.shared import TransportConfig
from trivet.errors import MessageRefused, WaitTimeout
from trivet.key_names import key_name
from trivet.process.encrypted_sockets import in_frames
from trivet.storage.durable import DECODE_ERRORS
from trivet.wire.batches import Batch
from trivet.wire.codec import SCHEMA_VERSION, decode, encode
from trivet.wire.control import MAGIC, Alive, BatchHeader, BatchReply, BatchVerdict
from trivet.wire.versions import Step

Buffer = bytes | memoryview
HeaderT = TypeVar("HeaderT", BatchHeader, BatchReply, Alive)

MAX_REASON_CHARS = 500
"""Limit of a reason that is logged or answered: it may quote what was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Identifies the run that both ends must be of."""

    run_id: str
    attempt: int
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMessage:
    """A batch as it is sent."""

    header: BatchHeader
    payload: bytes

    @property
    def frames(self) -> list[Buffer]:
        """The header, then the payload, in frames of a limited size."""
        return [encode(self.header), *in_frames(self.payload)]


def make_message(batch: Batch, *, key: RunKey, max_message_mib: int) -> BatchMessage:
    """Encode a batch under its header.

    Raises:
        MessageRefused: the encoded batch is larger than the limit.
    """
    payload = encode(batch)
    if len(payload) > max_message_mib << 20:
        raise MessageRefused(_too_large(f"batch {batch.step}", len(payload), max_message_mib))
    header = BatchHeader(
        schema=key.schema,
        run_id=key.run_id,
        attempt=key.attempt,
        step=batch.step,
        num_bytes=len(payload),
        checksum=zlib.crc32(payload),
    )
    return BatchMessage(header=header, payload=payload)


def make_alive(key: RunKey, *, acknowledged: Step | None = None) -> bytes:
    """Encode the one frame by which the orchestrator says that it is well, or what it has read."""
    return encode(Alive(run_id=key.run_id, attempt=key.attempt, acknowledged=acknowledged))


def read_header(frame: Buffer, kind: type[HeaderT]) -> HeaderT:
    """Decode the first frame of a message.

    Raises:
        MessageRefused: the frame is not ours at all.
    """
    header = decode(frame, kind)
    if header.magic != MAGIC:
        raise MessageRefused(f"the message starts with {header.magic!r}, not with {MAGIC!r}: it is not of this program")
    return header


def refusal(header: BatchHeader, parts: Sequence[Buffer], *, key: RunKey, max_message_mib: int) -> str | None:
    """Return the reason why a message can never be accepted, or None when its payload may be decoded."""
    name = f"batch {header.step}"
    if header.schema != key.schema:
        return f"{name} has schema {header.schema}, the trainer reads {key.schema}; install the same version on both sides"
    if header.run_id != key.run_id:
        return f"{name} is of run {header.run_id!r}, the trainer is of run {key.run_id!r}; give both roles the same run.id"
    if header.attempt != key.attempt:
        return (
            f"{name} is of attempt {header.attempt}, the trainer of attempt {key.attempt} of run {key.run_id!r}; "
            "stop what is left of the earlier attempt, or give both roles the same run.attempt"
        )
    num_bytes = sum(map(len, parts))
    if num_bytes > max_message_mib << 20:
        return _too_large(name, num_bytes, max_message_mib)
    if num_bytes != header.num_bytes:
        return f"{name} arrived with {num_bytes} bytes, its header says {header.num_bytes}"
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    if checksum != header.checksum:
        return f"{name} does not match the checksum in its header: it was damaged on the way"
    return None


def make_reply(header: BatchHeader, verdict: BatchVerdict, *, reason: str = "") -> bytes:
    """Encode the trainer's reply to the batch under `header`."""
    return encode(BatchReply(step=header.step, checksum=header.checksum, verdict=verdict, reason=reason))


def is_acknowledged(frame: Buffer, *, message: BatchMessage) -> bool:
    """Return whether `frame` acknowledges `message`; a late answer to another message does not.

    Raises:
        MessageRefused: the receiver refused `message`; carries its reason.
    """
    try:
        reply = msgspec.msgpack.decode(frame, type=BatchReply)
    except DECODE_ERRORS:
        return False
    if (reply.step, reply.checksum) != (message.header.step, message.header.checksum):
        return False
    if reply.verdict is BatchVerdict.REFUSED:
        raise MessageRefused(f"the trainer refused a message: {reply.reason}")
    return True


def no_acknowledgement(step: Step, *, config: TransportConfig, met: str = "") -> WaitTimeout:
    """Return the error of a batch that was not acknowledged in time.

    Args:
        met: what was found instead of the run's trainer; empty: nothing is known.
    """
    remedy = met or "see the trainer's log, or raise orchestrator.rollout_transport.timeout_s"
    return WaitTimeout(
        f"the orchestrator waited {config.timeout_s:g} s for the trainer on {config.host}:{config.port} to acknowledge batch "
        f"{step}; {remedy}"
    )


def _too_large(name: str, num_bytes: int, max_message_mib: int) -> str:
    return (
        f"{name} has {num_bytes / 2**20:.2f} MiB, the limit is rollout_transport.max_message_mib = {max_message_mib}; "
        f"raise it in both roles, or make {key_name('orchestrator.batch_size')} or {key_name('seq_len')} smaller"
    )
