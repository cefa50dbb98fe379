"""The server's node of `weight_transports.py` where no engine runs: gets each policy that a line of standard input announces.

    weight_node.py SECRET http CACHE    fetch a `FetchablePolicy` into the directory CACHE; `delta`: the same
    weight_node.py SECRET gloo HOST     receive the files of a `TransferRound` into main memory

SECRET is the file of the run's secret. For each policy a line with the seconds is printed; with gloo first the port of a store.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import torch

from trivet.inference.policy_receiver import PolicyReceiver
from trivet.secret import read_secret
from trivet.storage.durable import FileRecord
from trivet.transfer.group import KEY_PURPOSE, open_store
from trivet.weights.fetch import PolicyCache
from trivet.wire.versions import FetchablePolicy, TransferRound

AnnouncedTransfer = tuple[TransferRound, dict[str, FileRecord]]
"""A round and the weight files of its policy."""


def get_each(kind: Any, get: Callable[[Any], object]) -> None:
    """Get the policy of each line, which is a `kind`, and print how long it took."""
    for line in sys.stdin:
        announced = msgspec.json.decode(line, type=kind)
        started, started_cpu = time.perf_counter(), time.process_time()
        get(announced)
        times = {"fetch_s": time.perf_counter() - started, "fetch_cpu_s": time.process_time() - started_cpu}
        print(json.dumps(times), flush=True)


def main() -> None:
    """Get policies until standard input ends."""
    file, transport, where = sys.argv[1:]
    secret = read_secret(Path(file))
    if transport != "gloo":
        with closing(PolicyCache(Path(where), run="bench", token=secret.token, environ=os.environ)) as policies:
            get_each(FetchablePolicy, lambda policy: policies.settle(policies.fetch(policy, max_bytes=1 << 40)))
        return
    store = open_store(where)
    print(store.port, flush=True)
    receiver = PolicyReceiver(device=torch.device("cpu"), key=secret.derive(KEY_PURPOSE))

    def receive(announced: AnnouncedTransfer) -> None:
        receiver.begin(*announced, rank=1)
        while not receiver.is_done():
            time.sleep(0.01)
        receiver.take()

    get_each(AnnouncedTransfer, receive)


if __name__ == "__main__":
    main()
