"""A worker that speaks the protocol and misbehaves: `python hostile_worker.py WAY … --channel FD`.

The way is the value of the variable HOSTILE_WAY. `-P -m MODULE`, which a pool puts before the descriptor, is ignored.
"""

import math
import os
import socket
import subprocess
import sys
import time

import msgspec
import numpy as np

from trivet.environments.workers.channel import pack_message
from trivet.environments.workers.main import limit_resources, make_hello
from trivet.wire.codec import decode
from trivet.wire.groups import EnvironmentInfo, Example
from trivet.wire.rollouts import Rollout, Sample
from trivet.wire.versions import VersionRun
from trivet.wire.workers import (
    EnvironmentLoaded,
    ExampleFound,
    GroupDone,
    Pulse,
    RunGroupOrder,
    WorkerAnswer,
    WorkerOrder,
)

SAMPLE = Sample(
    token_ids_T=np.array([5, 6, 7], dtype=np.int32),
    loss_mask_T=np.array([False, True, True]),
    logprobs_T=np.array([0, -0.5, -1.5], dtype=np.float32),
    versions=[VersionRun(0, 2)],
    temperature=1.0,
)


def rollouts_of(way: str, asked: RunGroupOrder) -> list[Rollout]:
    """Return the rollouts of a group, wrong in the given way or right."""
    sample, reward, count = SAMPLE, 1.0, asked.request.num_rollouts
    match way:
        case "short-logprobs":
            sample = msgspec.structs.replace(SAMPLE, logprobs_T=np.zeros(2, dtype=np.float32))
        case "nan-reward":
            reward = math.nan
        case "too-many":
            count += 1
    return [Rollout(index=index, reward=reward, samples=[sample]) for index in range(count)]


def answer_group(way: str, asked: RunGroupOrder, send) -> None:
    call = asked.call_id
    done = GroupDone(call_id=call, rollouts=rollouts_of(way, asked))
    match way:
        case "unknown-call":
            send(msgspec.structs.replace(done, call_id=call + 1000))
        case "prompt-for-group":
            send(ExampleFound(call_id=call, example=Example(prompt=[])))
        case "killed":
            os.kill(os.getpid(), 9)
        case "hangs" | "no-pulse":
            time.sleep(3600)
        case "takes-memory":
            taken = [np.ones(2**23) for _ in range(64)]
            time.sleep(3600 + len(taken))
        case "child-takes-memory":
            subprocess.run([sys.executable, "-c", "x = b'1' * 2**30; import time; time.sleep(3600)"], check=False)
        case "garbage":
            send(None)
        case "answers-twice":
            send(done)
            send(done)
        case "leaves-files":
            with open(os.path.join(os.environ["TMPDIR"], "left"), "w") as file:  # noqa: PTH118
                file.write("x")
            send(done)
        case "opens-files":
            opened = []
            try:
                while True:
                    opened.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                print("opened", len(opened), flush=True)
            for descriptor in opened:
                os.close(descriptor)
            send(done)
        case "prints":
            line = b"x" * 2**20
            for _ in range(200):
                os.write(1, line)
            send(done)
        case _:
            send(done)


def receive(sock: socket.socket) -> WorkerOrder | None:
    """Return the next order; None when the pool is gone."""
    header = sock.recv(8, socket.MSG_WAITALL)
    return decode(sock.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL), WorkerOrder) if header else None


def main() -> None:
    way = os.environ["HOSTILE_WAY"]
    limit_resources()
    sock = socket.socket(fileno=int(sys.argv[-1]))
    hello = make_hello()
    if way == "other-protocol":
        hello = msgspec.structs.replace(hello, protocol=hello.protocol + 1, worker="trivet-worker 9.9")
    sock.sendall(pack_message(hello))
    if receive(sock) is None:
        return

    def send(body) -> None:
        sock.sendall(b"\x08" + bytes(7) + b"nonsense" if body is None else pack_message(WorkerAnswer(body=body)))

    send(EnvironmentLoaded(info=EnvironmentInfo(num_examples=4), api="v0"))
    if way != "no-pulse":
        send(Pulse(loop_age_s=0.0, num_generating=0, num_scoring=0, scoring_for_s=0.0, lags_s=[]))
    while (order := receive(sock)) is not None:
        if isinstance(order.body, RunGroupOrder):
            answer_group(way, order.body, send)


if __name__ == "__main__":
    main()
