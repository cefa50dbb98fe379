"""Protocols for sending batches from the orchestrator to the trainer.

Adapters: `transport.zeromq`, `transport.recording` and, for tests, `support.memory_transport`.
"""

from typing import Protocol

from trivet.wire.batches import Batch
from trivet.wire.versions import Step


class BatchSender(Protocol):
    """The orchestrator's end."""

    async def send(self, batch: Batch) -> None:
        """Returns once the trainer has acknowledged `batch`; until then it is sent again at an interval.

        Raises:
            MessageRefused: larger than the limit, or the trainer belongs to another run, attempt or schema.
            WaitTimeout: no acknowledgement within the configured time.
        """
        ...

    async def say_alive(self) -> None:
        """Tell a trainer that waits for the next batch that the orchestrator is well: its deadline starts anew."""
        ...

    async def aclose(self) -> None: ...


class BatchReceiver(Protocol):
    """The trainer's end, on rank 0. Acknowledges in the background while the trainer computes.

    What it must refuse, it refuses towards the sender and logs: a stranger's message is no reason to stop a healthy trainer.
    """

    def receive(self, step: Step) -> Batch:
        """Wait for the batch of `step`; each is delivered once, however often it arrives.

        Raises:
            WaitTimeout: neither the batch nor a sign of life within the configured time; says what was waited for, what
                arrived last and what was refused.
        """
        ...

    def close(self) -> None: ...
