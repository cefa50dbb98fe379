"""Makes the two ends of the transport, a relay that causes faults between them, and a trainer that acknowledges everything."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import zmq

from support.processes import find_free_port
from trivet.config.schema.shared import RunIdentity, TransportConfig
from trivet.process.sockets import key_pair
from trivet.secret import RunSecret
from trivet.transport.zeromq import KEY_PURPOSE, ZmqReceiver, ZmqSender
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.versions import TransferRound

Frames = list[bytes]
Relay = Callable[[Frames, Callable[[Frames], bytes | None]], bytes | None]
SECRET = RunSecret(bytes(range(32)))
RUN = RunIdentity(id="run")


def make_batch(step: int, *, num_tokens: int = 8, purpose: BatchPurpose = BatchPurpose.TRAIN) -> Batch:
    ids_T = np.arange(num_tokens, dtype=np.int32) + step
    row = MicroBatch(
        token_ids_T=ids_T,
        position_ids_T=np.arange(num_tokens, dtype=np.int32),
        loss_mask_T=ids_T % 2 == 0,
        logprobs_T=-ids_T.astype(np.float32),
        advantages_T=np.full(num_tokens, 0.5, dtype=np.float32),
        temperatures_T=np.ones(num_tokens, dtype=np.float32),
        sequence_lengths_S=np.array([num_tokens], dtype=np.int32),
        teacher_logprobs_T=-0.5 * ids_T.astype(np.float32),
    )
    return Batch(step=step, purpose=purpose, micro_batches=[row], group_ids=[step], num_rollouts=1)


def make_config(**changes) -> TransportConfig:
    return TransportConfig(**{"port": find_free_port(), "resend_interval_s": 0.05, "timeout_s": 30.0, **changes})


class ZmqRelay:
    """Stands between a ZeroMQ sender and receiver, and passes each message through `relay`."""

    def __init__(self, relay: Relay, *, target: int) -> None:
        self.port = find_free_port()
        self._relay = relay
        self._context = zmq.Context()
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        for end in (self._front, self._back):
            end.setsockopt(zmq.LINGER, 0)
        public, private = key_pair(SECRET.derive(KEY_PURPOSE))
        self._front.curve_server = True
        self._front.curve_secretkey = private
        self._back.curve_serverkey = public
        self._back.curve_publickey, self._back.curve_secretkey = zmq.curve_keypair()
        self._front.bind(f"tcp://127.0.0.1:{self.port}")
        self._back.connect(f"tcp://127.0.0.1:{target}")
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closing.is_set():
            if self._front.poll(10):
                sender, *frames = self._front.recv_multipart()
                if len(frames) == 1:  # a sign of life, which is not answered
                    self._back.send_multipart(frames)
                    continue
                reply = self._relay(frames, self._pass_on)
                if reply is not None:
                    self._front.send_multipart([sender, reply])

    def _pass_on(self, frames: Frames) -> bytes | None:
        while self._back.poll(0):
            self._back.recv()  # an answer that came too late belongs to no other message
        self._back.send_multipart(frames)
        return self._back.recv() if self._back.poll(200) else None

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self._context.destroy()


class Ends:
    """Makes the ends of a transport, and closes them with `stack`."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    def receiver(self, config: TransportConfig) -> ZmqReceiver:
        receiver = ZmqReceiver(config, secret=SECRET, run=RUN)
        self._stack.callback(receiver.close)
        return receiver

    def sender(self, config: TransportConfig, *, run: RunIdentity = RUN, relay: Relay | None = None, **options) -> ZmqSender:
        if relay is not None:
            between = ZmqRelay(relay, target=config.port)
            self._stack.callback(between.close)
            config = config.model_copy(update={"port": between.port})
        sender = ZmqSender(config, secret=SECRET, run=run, **options)
        self._stack.push_async_callback(sender.aclose)
        return sender

    def pair(self, config: TransportConfig | None = None, *, relay: Relay | None = None) -> tuple[ZmqReceiver, ZmqSender]:
        config = config or make_config()
        return self.receiver(config), self.sender(config, relay=relay)


def with_ends(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of an asynchronous function of the ends of the transport and the fixtures that it names."""

    def run(**fixtures: Any) -> None:
        async def main() -> None:
            async with AsyncExitStack() as stack:
                await test(Ends(stack), **fixtures)

        asyncio.run(main())

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    _, *fixtures = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]  # by which pytest finds the fixtures
    return run


class ReadyTrainer:
    """A sender whose trainer acknowledges every batch at once."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.on_batch: Callable[[Batch], None] = lambda _: None

    async def say_alive(self, *, transfer: TransferRound | None = None) -> None:
        pass

    async def send(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.on_batch(batch)

    async def aclose(self) -> None:
        pass


def assert_equal(found: Batch, sent: Batch) -> None:
    assert (found.step, found.purpose, found.group_ids) == (sent.step, sent.purpose, sent.group_ids)
    for found_row, sent_row in zip(found.micro_batches, sent.micro_batches, strict=True):
        assert found_row.experts_S == sent_row.experts_S == []
        for name in (name for name in MicroBatch.__struct_fields__ if name.endswith(("_T", "lengths_S"))):
            np.testing.assert_array_equal(getattr(found_row, name), getattr(sent_row, name))
            assert getattr(found_row, name) is None or getattr(found_row, name).dtype == getattr(sent_row, name).dtype
