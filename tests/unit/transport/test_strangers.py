"""A stranger without the run's secret changes nothing and costs little. Both sides report it once a minute."""

import asyncio
import contextlib
import logging
import socket
import threading
from contextlib import closing

import pytest
import zmq

from support.transport_ends import RUN, SECRET, make_batch, make_config
from trivet.config.schema.shared import RunIdentity
from trivet.errors import WaitTimeout
from trivet.process.sockets import MAX_FRAME_BYTES, key_pair
from trivet.secret import RunSecret
from trivet.transport.messages import Inbox, RepeatedWarning, make_message
from trivet.transport.zeromq import KEY_PURPOSE, ZmqReceiver, ZmqSender
from trivet.wire.batches import Alive, BatchReply, BatchVerdict
from trivet.wire.codec import decode, encode

OTHER_SECRET = RunSecret(bytes(32))
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The first bytes of a ZeroMQ client. The receiver's own have the same length."""
CLAIMED_BYTES = 700 << 20


@pytest.fixture
def receiver(monkeypatch):
    """Make a receiver that reports accepted batches and strangers."""
    config = make_config()
    receiver = ZmqReceiver(config, secret=SECRET, run=RUN)
    receiver.config, receiver.let_in, receiver.has_noticed = config, [], threading.Event()
    accept, log = receiver._inbox.accept, receiver._stranger_warning.log
    monkeypatch.setattr(receiver._inbox, "accept", lambda frames: receiver.let_in.append(len(frames)) or accept(frames))
    monkeypatch.setattr(receiver._stranger_warning, "log", lambda text: (log(text), receiver.has_noticed.set()))
    with closing(receiver):
        yield receiver


def forge(config, *, public=None):
    """Send the next batch as a stranger who knows everything but the secret."""
    message = make_message(make_batch(1), run=RUN, max_message_mib=1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        if public is not None:
            stranger.curve_serverkey = public
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(f"tcp://{config.host}:{config.port}")
        stranger.send_multipart(message.frames)
        yield stranger


@pytest.mark.parametrize("public", [None, key_pair(OTHER_SECRET.derive(KEY_PURPOSE))[0]], ids=["plain", "another-secret"])
def test_a_forged_batch_is_neither_read_nor_answered(receiver, public, caplog):
    attack = forge(receiver.config, public=public)
    stranger = next(attack)
    assert receiver.has_noticed.wait(20)
    assert stranger.poll(0) == 0
    assert receiver.let_in == []
    messages = [record.message for record in caplog.records if "someone without this run's secret connected" in record.message]
    assert len(messages) == 1
    assert "give both roles the same TRIVET_SECRET_FILE" in messages[0]
    attack.close()

    async def main():
        sender = ZmqSender(receiver.config, secret=SECRET, run=RUN)
        await sender.send(make_batch(1))
        await sender.aclose()

    asyncio.run(main())
    assert receiver.receive(1).step == 1


def test_a_sender_with_another_secret_is_told_so(receiver, caplog):
    config = receiver.config.model_copy(update={"timeout_s": 8.0})

    async def main():
        sender = ZmqSender(config, secret=OTHER_SECRET, run=RUN)
        with pytest.raises(WaitTimeout, match="does not have this run's secret; give both roles the same TRIVET_SECRET_FILE"):
            await sender.send(make_batch(1))
        await sender.aclose()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    messages = [record.message for record in caplog.records]
    assert len([text for text in messages if "what listens on" in text]) == 1
    assert len([text for text in messages if "someone without this run's secret connected" in text]) == 1
    assert receiver.let_in == []


def test_a_stranger_that_announces_a_huge_frame_is_cut_off(receiver):
    """A command of 700 MiB comes before any secret was shown. ZeroMQ would read it whole."""
    with socket.create_connection((receiver.config.host, receiver.config.port), timeout=20) as stranger:
        stranger.sendall(GREETING)
        with stranger.makefile("rb") as answer:
            assert len(answer.read(len(GREETING))) == len(GREETING)
        stranger.sendall(b"\x06" + CLAIMED_BYTES.to_bytes(8, "big"))
        assert pour(stranger) < 32 * MAX_FRAME_BYTES, "more than what the sockets hold was taken"
    assert receiver.let_in == []


def pour(stranger):
    """Return the number of bytes that were read before the connection was closed."""
    num_sent = 0
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while num_sent < CLAIMED_BYTES:
            num_sent += stranger.send(bytes(MAX_FRAME_BYTES))
    return num_sent


def test_a_long_refusal_is_cut_and_not_repeated(caplog):
    """In the attack, a field that the refusal quotes has 20 MB."""
    inbox = Inbox(make_config(), run=RUN, clock=lambda: 0.0)
    frame = encode(Alive(magic="x" * (20 << 20), run_id="run", attempt=1))
    for _ in range(3):
        assert inbox.accept([frame]) is None
    assert len(caplog.records) == 1
    assert len(caplog.text) < 2000


def test_an_answer_to_a_batch_of_another_run_quotes_little_of_it():
    inbox = Inbox(make_config(), run=RUN)
    stranger = make_message(make_batch(1), run=RunIdentity(id="x" * (20 << 20)), max_message_mib=1)
    answer = inbox.accept(stranger.frames)
    assert decode(answer, BatchReply).verdict is BatchVerdict.REFUSED
    assert len(answer) < 2000


def test_a_warning_is_said_once_a_minute_with_what_was_not_said(caplog):
    now = iter([0.0, 1.0, 59.0, 61.0])
    warning = RepeatedWarning(logging.getLogger("test"), clock=lambda: next(now))
    for _ in range(4):
        warning.log("again")
    assert [record.message for record in caplog.records] == ["again", "again (and 2 more since the last such line)"]
