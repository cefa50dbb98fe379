"""Decides about each message that the trainer receives, holds a bounded number of batches, and delivers each once.

A network thread calls `accept`, the trainer calls `take`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from trivet.config.schema.shared import TransportConfig
from trivet.errors import MessageRefused, WaitTimeout
from trivet.transport.frames import MAX_REASON_CHARS, Buffer, RunKey, make_reply, read_header, refusal
from trivet.transport.repeated import RepeatedWarning
from trivet.wire.batches import Batch
from trivet.wire.codec import decode
from trivet.wire.control import Alive, BatchHeader, BatchVerdict
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

_CALL_INTERVAL_S = 30.0
"""Seconds between two calls of `on_wait` while `take` waits."""
MAX_HELD = 2
"""Batches that wait for the trainer. A further one gets no answer, so the sender keeps it and sends it again."""


class Inbox:
    """Holds accepted batches until the trainer takes them.

    consumes: frames, in any order, any number of times
    produces: the reply to each, and batches by step
    waits for: the batch of the step that `take` names, at most `timeout_s` after the orchestrator last said that it is well
    unblocked by: `accept` of that batch, `fail`
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        key: RunKey,
        on_wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty.

        Args:
            on_wait: called now and then by `take` while it waits.
        """
        self._config = config
        self._key = key
        self._on_wait = on_wait
        self._clock = clock
        self._changed = threading.Condition()
        self._held: dict[Step, Batch] = {}
        self._checksums: dict[Step, int] = {}
        """Checksums of the accepted batches: they tell a duplicate from another batch under the same step."""
        self._wanted: Step | None = None
        self._failure: str | None = None
        self._last_arrival: tuple[Step, float] | None = None
        self._last_refusal: str | None = None
        self._refusals = RepeatedWarning(logger, clock=clock)
        self._last_alive = float("-inf")
        self._unread: Step | None = None
        """The batch that was acknowledged last, until the orchestrator has read it."""

    def accept(self, frames: Sequence[Buffer]) -> bytes | None:
        """Return the reply to one message. None: it is not ours, or its batch finds no place yet."""
        try:
            if len(frames) == 1:
                self._note_alive(read_header(frames[0], Alive))
                return None
            if not frames:
                raise MessageRefused("a message without frames")
            header = read_header(frames[0], BatchHeader)
        except MessageRefused as exc:
            self._note_refusal(str(exc))
            return None
        with self._changed:
            self._last_arrival = (header.step, self._clock())
            return self._answer(header, frames[1:])

    @property
    def wanted(self) -> Step | None:
        """The step that `take` waits for, or waited for last."""
        return self._wanted

    def take(self, step: Step) -> Batch:
        """Wait for the batch of `step`, and drop those of earlier steps.

        Raises:
            WaitTimeout: the batch did not come in time, or the network side failed.
        """
        started = self._clock()
        with self._changed:
            self._wanted = step
            for late in [held for held in self._held if held < step]:
                logger.warning("batch dropped step=%d reason=the trainer went on to step %d", late, step)
                del self._held[late]
        while (batch := self._wait_for(step, started=started)) is None:
            self._on_wait()
        return batch

    def _wait_for(self, step: Step, *, started: float) -> Batch | None:
        """Return the batch, or None when it is time to call `on_wait`."""
        call_at = self._clock() + _CALL_INTERVAL_S
        with self._changed:
            while step not in self._held:
                now = self._clock()
                left = max(started, self._last_alive) + self._config.timeout_s - now
                if self._failure is not None:
                    raise WaitTimeout(f"the trainer cannot receive batch {step}: {self._failure}")
                if left <= 0:
                    raise WaitTimeout(self._explain_timeout(step))
                if now >= call_at:
                    return None
                self._changed.wait(min(left, call_at - now))
            return self._held.pop(step)

    def wait_until_read(self, timeout_s: float) -> None:
        """Return once the orchestrator has said that it read the last acknowledgement, or after `timeout_s`.

        Who goes away before takes an acknowledgement that lies unread at the other end with it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unread is None or self._failure is not None, timeout_s)

    def fail(self, reason: str) -> None:
        """Wake `take`: no message will arrive any more."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def _answer(self, header: BatchHeader, parts: Sequence[Buffer]) -> bytes | None:
        if reason := refusal(header, parts, key=self._key, max_message_mib=self._config.max_message_mib):
            return self._refuse(header, reason)
        known = self._checksums.get(header.step)
        if known is not None:
            if known != header.checksum:
                return self._refuse(header, f"batch {header.step} was received before with other content")
            return self._acknowledge(header)
        if len(self._held) >= MAX_HELD and header.step != self._wanted:
            return None
        try:
            batch = decode(parts[0] if len(parts) == 1 else b"".join(parts), Batch)
        except MessageRefused as exc:
            return self._refuse(header, str(exc))
        if batch.step != header.step:
            return self._refuse(header, f"batch {batch.step} came under the header of batch {header.step}")
        self._held[header.step] = batch
        self._checksums[header.step] = header.checksum
        self._changed.notify_all()
        return self._acknowledge(header)

    def _acknowledge(self, header: BatchHeader) -> bytes:
        self._unread = header.step
        return make_reply(header, BatchVerdict.ACKNOWLEDGED)

    def _note_alive(self, alive: Alive) -> None:
        if (alive.run_id, alive.attempt) == (self._key.run_id, self._key.attempt):
            with self._changed:
                self._last_alive = self._clock()
                if alive.acknowledged == self._unread:
                    self._unread = None
                    self._changed.notify_all()

    def _refuse(self, header: BatchHeader, reason: str) -> bytes:
        self._note_refusal(reason)
        return make_reply(header, BatchVerdict.REFUSED, reason=reason[:MAX_REASON_CHARS])

    def _note_refusal(self, reason: str) -> None:
        self._last_refusal = reason[:MAX_REASON_CHARS]
        self._refusals.say(f"message refused reason={self._last_refusal}")

    def _explain_timeout(self, step: Step) -> str:
        if self._last_arrival is None:
            seen = "nothing has arrived from it"
        else:
            last_step, at = self._last_arrival
            seen = f"the last to arrive was batch {last_step}, {self._clock() - at:.0f} s ago"
        refused = f"; refused last: {self._last_refusal}" if self._last_refusal else ""
        return (
            f"the trainer waited {self._config.timeout_s:g} s for batch {step} from the orchestrator; {seen}{refused}; "
            "see the orchestrator's log, or raise trainer.rollout_transport.timeout_s"
        )
