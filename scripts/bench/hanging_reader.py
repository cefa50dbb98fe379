"""Does training wait for a server that hangs?

The trainer takes steps on made-up batches and publishes a policy after each. In turns nobody reads policies, and the only reader
hangs: it has acknowledged version 0, requests a file of each policy from the origin, and takes no byte of it.

    uv run python scripts/bench/hanging_reader.py [--rounds 3] [--steps 40]

`step_over_step` is the median over rounds of the median step with the reader over the one without; training that never waits gives
1. `wait_s` is the longest time that a step spent on publication in the trainer's own thread, the copy of the weights included.
`kept` are policies on the disk at the end: none is removed that a reader may still need. This reader is made up. In a run the
servers acknowledge nothing; the orchestrator does, and sends batches only as long as it loads policies. The last line is one JSON
object.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from training import hardware

from trivet.config.layout import RunLayout
from trivet.examples.tiny_model import make_model, make_tokenizer
from trivet.secret import make_secret
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import read_manifest
from trivet.weights.retention import acknowledge
from trivet.wire.versions import START_VERSION

FIRST_STEP = 5
"""Steps before it wait for torch to have seen every shape."""


@contextmanager
def hanging_reader(layout: RunLayout, *, port: int) -> Iterator[None]:
    """Request a file of each policy while the block runs, and take no byte of it."""
    acknowledge(layout, "hanging", START_VERSION)
    token, is_over, sockets = make_secret(layout.secret).token, threading.Event(), list[socket.socket]()

    def request() -> None:
        asked = set[int]()
        while not is_over.wait(0.2):
            for version in {*published_versions(layout)} - asked:
                digest = read_manifest(layout.weights_step(version)).digest
                sockets.append(socket.create_connection(("127.0.0.1", port)))
                path = f"/weights/{version}/{digest}/model.safetensors"
                sockets[-1].sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
                asked.add(version)

    thread = threading.Thread(target=request)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for each in sockets:
            each.close()


def measure(model: Path, directory: Path, *, hangs: bool, steps: int, port: int) -> dict[str, float]:
    """Train; return the median step, the longest wait and the policies that are left."""
    layout = RunLayout(directory)
    make_secret(layout.secret)
    words = ["--output-dir", directory, "--model.name", model, "--weights.origin.port", port]
    with ExitStack() as stack:
        stack.enter_context(origin := subprocess.Popen([sys.executable, "-m", "trivet.origin", *map(str, words)]))
        stack.callback(origin.terminate)
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.2)
        if hangs:
            stack.enter_context(hanging_reader(layout, port=port))
        fake = ["--data.fake", "--max-steps", steps, "--model.seq-len", 512, "--weights.transport", "http"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # with more, a step waits for threads that other work has displaced
        subprocess.run([sys.executable, "-m", "trivet.trainer.main", *map(str, [*words, *fake])], check=True, env=environ)
        rows = [json.loads(line) for line in (layout.metrics / "trainer.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["step"] >= FIRST_STEP]
        return {
            "step_s": statistics.median(row["time/step"] for row in rows),
            "wait_s": max(row["time/broadcast_weights"] for row in rows),
            "kept": len(published_versions(layout)),
        }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=5571)
    args = parser.parse_args()
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        model, tokenizer = Path(name) / "model", make_tokenizer()
        make_model(tokenizer, hidden_size=256, layers=4, seed=1, tied=True).save_pretrained(model)
        tokenizer.save_pretrained(model)
        for number in range(args.rounds):
            for hangs in (False, True) if number % 2 == 0 else (True, False):
                directory = Path(name) / f"{number}-{hangs}"
                found[hangs].append(measure(model, directory, hangs=hangs, steps=args.steps, port=args.port))
                print(f"hangs={hangs}: {found[hangs][-1]}", file=sys.stderr, flush=True)
    ratios = [slow["step_s"] / fast["step_s"] for fast, slow in zip(found[False], found[True], strict=True)]
    result = {
        "bench": "hanging_reader",
        "step_over_step": round(statistics.median(ratios), 3),
        "alone": found[False],
        "hanging": found[True],
        "steps": args.steps,
        "hardware": hardware(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
