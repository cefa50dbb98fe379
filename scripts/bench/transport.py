"""How fast do batches cross from the orchestrator to the trainer?

Two processes on this machine, real ZeroMQ over loopback: this one sends, a child receives and asks for each batch at once. A
message counts when its acknowledgement is back, encoding, checksum and decoding included. Batches are those of a usual step:
128 rollouts of 512 tokens in rows of 2,048.

Ceiling: the checksum and two copies through the kernel, about the rate that `ceiling_mib_per_s` measures by sending one
payload's bytes over a plain loopback socket and summing them on both sides. Baseline: the same path with every array as a
MessagePack list of numbers.

    uv run python scripts/bench/transport.py [--rollouts 128] [--tokens 512] [--messages 60]
"""

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.process
import os
import platform
import socket
import statistics
import threading
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import zmq
from receiving import SECRET, free_port

from trivet.algorithms.packing import PackItem, pack
from trivet.config.schema.shared import RunIdentity, TransportConfig
from trivet.process.lifetime import die_with_parent
from trivet.transport.zeromq import ZmqReceiver, ZmqSender
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.codec import encode
from trivet.wire.rollouts import Sample
from trivet.wire.versions import PolicyVersion, Step, VersionRun

WARM_UP = 5
BLOCKS = 5
"""Messages are timed in this many blocks; median and spread are over blocks."""


def make_batch(*, step: int, num_rollouts: int, num_tokens: int) -> Batch:
    """Make a batch of random tokens."""
    rng = np.random.default_rng(step)
    items = [
        PackItem(
            sample=Sample(
                token_ids_T=rng.integers(0, 150_000, num_tokens, dtype=np.int32),
                loss_mask_T=np.arange(num_tokens) >= num_tokens // 4,
                logprobs_T=-rng.random(num_tokens, dtype=np.float32),
                versions=[VersionRun(PolicyVersion(0), num_tokens)],
                temperature=1.0,
            ),
            advantage=float(rng.normal()),
        )
        for _ in range(num_rollouts)
    ]
    rows = pack(items, seq_len=max(2048, num_tokens))
    return Batch(step=Step(step), purpose=BatchPurpose.TRAIN, micro_batches=rows, group_ids=[], num_rollouts=num_rollouts)


def receive_all(config: TransportConfig, num_messages: int, ready: Connection) -> None:
    """Receive and acknowledge messages, in a process of its own."""
    die_with_parent()
    receiver = ZmqReceiver(config, secret=SECRET, run=RunIdentity(id="bench"))
    ready.send(True)
    for step in range(1, num_messages + 1):
        receiver.receive(Step(step))
    receiver.close()


def start_receiver(target: Callable[..., None], *args: object) -> multiprocessing.process.BaseProcess:
    """Start a process that runs `target(*args, ready)`; return once it listens."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=target, args=(*args, there))
    child.start()
    if not here.poll(60):
        raise TimeoutError("the receiving process was not ready after 60 s")
    return child


async def time_sends(config: TransportConfig, batches: list[Batch]) -> list[float]:
    """Return the seconds until each batch was acknowledged."""
    sender = ZmqSender(config, secret=SECRET, run=RunIdentity(id="bench"))
    times = []
    for batch in batches:
        start = time.perf_counter()
        await sender.send(batch)
        times.append(time.perf_counter() - start)
    await sender.aclose()
    return times


def measure_transport(config: TransportConfig, batches: list[Batch]) -> list[float]:
    """Return the seconds of each batch over our transport."""
    child = start_receiver(receive_all, config, len(batches))
    times = asyncio.run(time_sends(config, batches))
    child.join(60)
    return times


def receive_lists(port: int, num_messages: int, ready: Connection) -> None:
    """Receive the lists of the baseline, in a process of its own."""
    die_with_parent()
    with zmq.Context() as context, context.socket(zmq.REP) as replier:
        replier.bind(f"tcp://127.0.0.1:{port}")
        ready.send(True)
        for _ in range(num_messages):
            for row in msgspec.msgpack.decode(replier.recv()):
                for values in row.values():
                    np.array(values)
            replier.send(b"")


def measure_lists(port: int, batches: list[Batch]) -> list[float]:
    """Return the seconds of each batch over the baseline, a straightforward implementation."""
    child = start_receiver(receive_lists, port, len(batches))
    times = []
    with zmq.Context() as context, context.socket(zmq.REQ) as requester:
        requester.connect(f"tcp://127.0.0.1:{port}")
        for batch in batches:
            start = time.perf_counter()
            rows = [
                {name: array.tolist() for name in MicroBatch.__struct_fields__ if (array := getattr(row, name)) is not None}
                for row in batch.micro_batches
            ]
            requester.send(msgspec.msgpack.encode(rows))
            requester.recv()
            times.append(time.perf_counter() - start)
    child.join(60)
    return times


def measure_ceiling(payload: bytes, *, repeats: int) -> float:
    """Return MiB/s of one payload over a plain loopback socket, summed on both sides."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        peer, _ = server.accept()
        buffer = bytearray(len(payload))
        with peer:
            for _ in range(repeats):
                view = memoryview(buffer)
                while view:
                    view = view[peer.recv_into(view) :]
                zlib.crc32(buffer)
                peer.sendall(b"k")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    times = []
    with socket.create_connection(server.getsockname()) as peer:
        for _ in range(repeats):
            start = time.perf_counter()
            zlib.crc32(payload)
            peer.sendall(payload)
            peer.recv(1)
            times.append(time.perf_counter() - start)
    thread.join(10)
    server.close()
    return len(payload) / 2**20 / statistics.median(times)


def rates(times: list[float]) -> list[float]:
    """Return messages per second of each block, without the warm-up."""
    return [len(block) / float(block.sum()) for block in np.array_split(np.array(times[WARM_UP:]), BLOCKS)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--messages", type=int, default=60, help="timed, after the warm-up")
    args = parser.parse_args()
    steps = range(1, args.messages + WARM_UP + 1)
    batches = [make_batch(step=step, num_rollouts=args.rollouts, num_tokens=args.tokens) for step in steps]
    payload = encode(batches[0])
    mib = len(payload) / 2**20
    print(f"{args.messages} messages of {args.rollouts} rollouts x {args.tokens} tokens, {mib:.2f} MiB each")
    ours = rates(measure_transport(TransportConfig(port=free_port()), batches))
    lists = rates(measure_lists(free_port(), batches))
    ceiling = measure_ceiling(payload, repeats=args.messages)
    messages_per_s = statistics.median(ours)
    result: dict[str, Any] = {
        "benchmark": "transport",
        "messages_per_s": round(messages_per_s, 1),
        "messages_per_s_spread": [round(min(ours), 1), round(max(ours), 1)],
        "mib_per_s": round(messages_per_s * mib, 1),
        "baseline_messages_per_s": round(statistics.median(lists), 1),
        "speedup": round(messages_per_s / statistics.median(lists), 1),
        "ceiling_mib_per_s": round(ceiling, 1),
        "ceiling_share": round(messages_per_s * mib / ceiling, 3),
        "config": {**vars(args), "message_mib": round(mib, 3)},
        "versions": {"python": platform.python_version(), "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()},
        "hardware": {"cpu_count": os.cpu_count(), "machine": platform.machine()},
    }
    print(f"{messages_per_s:.0f} messages/s, {result['speedup']} times lists of numbers, {ceiling:.0f} MiB/s is the ceiling")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
