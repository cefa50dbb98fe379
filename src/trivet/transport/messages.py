"""Defines the messages from the orchestrator to the trainer, and decides which are accepted. No socket is opened here.

A batch is sent as a header and the parts of its payload. They are checked before the payload is decoded. `Inbox` holds a bounded
number of batches and delivers each once. `BatchSender` and `BatchReceiver` are the two ends, which `transport.zeromq` implements;
`transport.recording` has other receivers.
"""

import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from trivet.config.schema.shared import RunIdentity, TransportConfig
from trivet.errors import MessageRefused, WaitTimeout
from trivet.key_names import key_name
from trivet.process.sockets import in_frames
from trivet.storage.durable import DECODE_ERRORS
from trivet.wire.batches import MAGIC, Alive, Batch, BatchHeader, BatchReply, BatchVerdict
from trivet.wire.codec import SCHEMA_VERSION, decode, encode
from trivet.wire.versions import Step, TransferRound

logger = logging.getLogger(__name__)

Buffer = bytes | memoryview
"""One frame of a message."""
HeaderT = TypeVar("HeaderT", BatchHeader, Alive)

MAX_HELD = 2
"""Limit of batches that wait for the trainer. A further batch gets no answer, so the sender keeps it and sends it again."""
_MAX_REASON_CHARS = 500
"""Limit of the reason for a refusal in the log and in the answer, because the reason may quote the message."""
_CALL_INTERVAL_S = 30.0
"""Seconds between two calls of `on_wait` while `take` waits."""
_WARNING_INTERVAL_S = 60.0
"""Shortest time between two lines of a warning that strangers can cause: they are seen, and do not fill the log."""


class BatchSender(Protocol):
    """The orchestrator's end of the connection."""

    async def send(self, batch: Batch) -> None:
        """Send `batch` again and again, at an interval, until the trainer acknowledges it.

        Raises:
            MessageRefused: the batch is larger than the limit, or the trainer has another run, attempt or schema.
            WaitTimeout: no acknowledgement came within the configured time.
        """
        ...

    async def say_alive(self, *, transfer: TransferRound | None = None) -> None:
        """Send a sign of life. The deadline of a trainer that waits for the next batch starts anew.

        Args:
            transfer: a round that the trainer should begin. It does not if the message is lost.
        """
        ...

    async def aclose(self) -> None:
        """Close the connection. May be called again."""
        ...


class BatchReceiver(Protocol):
    """The trainer's end of the connection, on rank 0. It acknowledges batches in the background while the trainer computes.

    A message that it must refuse is answered and logged, and never raises: a stranger's message must not stop a healthy trainer.
    """

    def receive(self, step: Step) -> Batch:
        """Wait for the batch of `step`. Each batch is delivered once, however often it arrives.

        Raises:
            WaitTimeout: neither the batch nor a sign of life came within the configured time. The message names the last batch
                that arrived and the last refusal.
        """
        ...

    def close(self) -> None:
        """Close the connection; a waiting `receive` fails."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMessage:
    """A batch that is encoded for sending."""

    header: BatchHeader
    frames: list[Buffer]
    """The encoded header, then the payload, in frames of a limited size."""


def make_message(batch: Batch, *, run: RunIdentity, max_message_mib: int) -> BatchMessage:
    """Encode a batch with its header.

    Raises:
        MessageRefused: the encoded batch is larger than the limit.
    """
    payload = encode(batch)
    _check_size(f"batch {batch.step}", len(payload), max_message_mib)
    header = BatchHeader(
        schema=SCHEMA_VERSION,
        run_id=run.id,
        attempt=run.attempt,
        step=batch.step,
        num_bytes=len(payload),
        checksum=zlib.crc32(payload),
    )
    return BatchMessage(header=header, frames=[encode(header), *in_frames(payload)])


def is_acknowledged(frame: Buffer, *, header: BatchHeader) -> bool:
    """Return whether `frame` acknowledges the batch that has `header`. False for a late answer to another batch.

    Raises:
        MessageRefused: the receiver refused the batch, with its reason.
    """
    try:
        reply = msgspec.msgpack.decode(frame, type=BatchReply)
    except DECODE_ERRORS:
        return False
    if (reply.step, reply.checksum) != (header.step, header.checksum):
        return False
    if reply.verdict is BatchVerdict.REFUSED:
        raise MessageRefused(f"the trainer refused a message: {reply.reason}")
    return True


def _check_size(name: str, num_bytes: int, max_message_mib: int) -> None:
    if num_bytes > max_message_mib << 20:
        raise MessageRefused(
            f"{name} has {num_bytes / 2**20:.2f} MiB, the limit is rollout_transport.max_message_mib = {max_message_mib}; "
            f"raise it in both roles, or make {key_name('orchestrator.batch_size')} or {key_name('seq_len')} smaller"
        )


def _require_acceptable(header: BatchHeader, parts: Sequence[Buffer], *, run: RunIdentity, max_message_mib: int) -> None:
    """Check a message before its payload is decoded.

    Raises:
        MessageRefused: the message can never be accepted, with the reason.
    """
    name, num_bytes, checksum = f"batch {header.step}", sum(map(len, parts)), 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    if header.schema != SCHEMA_VERSION:
        reason = f"has schema {header.schema}, the trainer reads {SCHEMA_VERSION}; install the same version on both sides"
    elif header.run_id != run.id:
        reason = f"is of run {header.run_id!r}, the trainer is of run {run.id!r}; give both roles the same run.id"
    elif header.attempt != run.attempt:
        reason = (
            f"is of attempt {header.attempt}, the trainer of attempt {run.attempt} of run {run.id!r}; "
            "stop what is left of the earlier attempt, or give both roles the same run.attempt"
        )
    elif num_bytes != header.num_bytes:
        reason = f"arrived with {num_bytes} bytes, its header says {header.num_bytes}"
    elif checksum != header.checksum:
        reason = "does not match the checksum in its header: it was damaged on the way"
    else:
        _check_size(name, num_bytes, max_message_mib)
        return
    raise MessageRefused(f"{name} {reason}")


class RepeatedWarning:
    """Logs a warning that strangers can cause, in at most one line a minute. Use it from one thread at a time."""

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._num_left_out = 0
        """Warnings that were not logged since the last line."""
        self._logged_at = float("-inf")

    def log(self, text: str) -> None:
        """Log `text`, unless a line was logged less than a minute ago: then it is only counted, for the next line."""
        now = self._clock()
        if now - self._logged_at < _WARNING_INTERVAL_S:
            self._num_left_out += 1
            return
        more = f" (and {self._num_left_out} more since the last such line)" if self._num_left_out else ""
        self._logged_at, self._num_left_out = now, 0
        self._logger.warning("%s%s", text, more)


class Inbox:
    """Holds accepted batches until the trainer takes them. The receiver's thread calls `accept`, the trainer's calls `take`.

    consumes: messages, in any order and any number of times
    produces: the reply to each message, and batches by step
    waits for: the batch of the step that `take` names, at most `timeout_s` after the last sign of life of the orchestrator
    unblocked by: `accept` of that batch, or `fail`
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        run: RunIdentity,
        on_wait: Callable[[], None] = lambda: None,
        on_transfer: Callable[[TransferRound], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty.

        Args:
            on_wait: called every 30 s by `take` while it waits.
            on_transfer: called by `accept` with a round that the trainer should begin.
        """
        self.wanted: Step | None = None
        """The step that `take` waits for, or waited for last."""
        self._config = config
        self._run = run
        self._on_wait = on_wait
        self._on_transfer = on_transfer
        self._clock = clock
        self._changed = threading.Condition()
        self._held: dict[Step, Batch] = {}
        self._checksums: dict[Step, int] = {}
        """Checksums of all accepted batches by step: equal for a duplicate, different for another batch under the same step."""
        self._failure: str | None = None
        """The reason why no message will arrive any more, once `fail` was called."""
        self._last_arrival: tuple[Step, float] | None = None
        """Step of the last batch that arrived, and the time; None before the first."""
        self._last_refusal = ""
        self._refusals = RepeatedWarning(logger, clock=clock)
        self._last_alive = float("-inf")
        """Time of the last sign of life."""
        self._unread: Step | None = None
        """The batch that was acknowledged last; None once the orchestrator has read the acknowledgement."""

    def accept(self, frames: Sequence[Buffer]) -> bytes | None:
        """Handle one message and return the reply to it.

        None when it gets no reply: it is a sign of life, it is not of this program, or there is no space for its batch yet.
        """
        header: BatchHeader | None = None
        with self._changed:
            try:
                if len(frames) == 1:  # a batch has its payload in further frames
                    alive = _read_header(frames[0], Alive)
                    if (alive.run_id, alive.attempt) == (self._run.id, self._run.attempt):
                        self._last_alive = self._clock()
                        self._unread = None if alive.acknowledged == self._unread else self._unread
                        self._changed.notify_all()
                        if alive.transfer is not None:
                            self._on_transfer(alive.transfer)
                    return None
                header = _read_header(frames[0] if frames else b"", BatchHeader)
                self._last_arrival = (header.step, self._clock())
                return self._hold(header, frames[1:])
            except MessageRefused as exc:
                self._last_refusal = str(exc)[:_MAX_REASON_CHARS]
                self._refusals.log(f"message refused reason={self._last_refusal}")
                return _reply(header, BatchVerdict.REFUSED, reason=self._last_refusal) if header is not None else None

    def _hold(self, header: BatchHeader, parts: Sequence[Buffer]) -> bytes | None:
        """Store a batch that is new and return its acknowledgement; None while there is no space for it."""
        _require_acceptable(header, parts, run=self._run, max_message_mib=self._config.max_message_mib)
        accepted_checksum = self._checksums.get(header.step)
        if accepted_checksum is None:
            if len(self._held) >= MAX_HELD and header.step != self.wanted:
                return None
            batch = decode(parts[0] if len(parts) == 1 else b"".join(parts), Batch)
            if batch.step != header.step:
                raise MessageRefused(f"batch {batch.step} came under the header of batch {header.step}")
            self._held[header.step] = batch
            self._checksums[header.step] = header.checksum
            self._changed.notify_all()
        elif accepted_checksum != header.checksum:
            raise MessageRefused(f"batch {header.step} was received before with other content")
        self._unread = header.step
        return _reply(header, BatchVerdict.ACKNOWLEDGED)

    def take(self, step: Step) -> Batch:
        """Wait for the batch of `step` and return it. Batches of earlier steps are dropped.

        Raises:
            WaitTimeout: the batch did not come in time, or the network side failed.
        """
        started = self._clock()
        with self._changed:
            self.wanted = step
            for late in [held for held in self._held if held < step]:
                logger.warning("batch dropped step=%d reason=the trainer went on to step %d", late, step)
                del self._held[late]
        while True:
            call_at = self._clock() + _CALL_INTERVAL_S
            with self._changed:
                while step not in self._held and (now := self._clock()) < call_at:
                    left = max(started, self._last_alive) + self._config.timeout_s - now
                    if self._failure is not None:
                        raise WaitTimeout(f"the trainer cannot receive batch {step}: {self._failure}")
                    if left <= 0:
                        raise self._timeout(step, now)
                    self._changed.wait(min(left, call_at - now))
                if step in self._held:
                    return self._held.pop(step)
            self._on_wait()

    def _timeout(self, step: Step, now: float) -> WaitTimeout:
        seen = "nothing has arrived from it"
        if self._last_arrival is not None:
            last_step, at = self._last_arrival
            seen = f"the last to arrive was batch {last_step}, {now - at:.0f} s ago"
        refused = f"; refused last: {self._last_refusal}" if self._last_refusal else ""
        return WaitTimeout(
            f"the trainer waited {self._config.timeout_s:g} s for batch {step} from the orchestrator; {seen}{refused}; "
            "see the orchestrator's log, or raise trainer.rollout_transport.timeout_s"
        )

    def wait_until_read(self, timeout_s: float) -> None:
        """Return once the orchestrator has reported that it read the last acknowledgement, or after `timeout_s`.

        If the receiver closed earlier, ZeroMQ would drop an acknowledgement that the orchestrator has not read yet.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unread is None or self._failure is not None, timeout_s)

    def fail(self, reason: str) -> None:
        """Make `take` fail with `reason`: no message will arrive any more."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()


def _read_header(frame: Buffer, kind: type[HeaderT]) -> HeaderT:
    """Decode the first frame of a message. Raises MessageRefused when the message is not of this program."""
    header = decode(frame, kind)
    if header.magic != MAGIC:
        raise MessageRefused(f"the message starts with {header.magic!r}, not with {MAGIC!r}: it is not of this program")
    return header


def _reply(header: BatchHeader, verdict: BatchVerdict, *, reason: str = "") -> bytes:
    return encode(BatchReply(step=header.step, checksum=header.checksum, verdict=verdict, reason=reason))
