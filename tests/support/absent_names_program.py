"""Waits for the names that other machines create in a run, as a process of another node does, and prints when it saw each.

    python absent_names_program.py OUTPUT_DIR SECONDS

Each line is a name and the Unix time. It ends when every name was seen, or after SECONDS.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import STABLE, RunLayout
from trivet.evaluation.targets import complete_steps
from trivet.storage.durable import is_listed
from trivet.weights.catalog import latest_version
from trivet.weights.retention import LiveReaders

POLL_S = 0.1


def main(output_dir: Path, seconds: float) -> int:
    layout = RunLayout(output_dir)
    signs: dict[str, Callable[[], object]] = {
        "policy": lambda: latest_version(layout),
        "resumed policy": lambda: is_listed(layout.weights_step(1)) and (layout.weights_step(1) / STABLE).exists(),
        "evaluated policy": lambda: complete_steps(layout.weights),
        "commit": lambda: committed_steps(layout),
        "reader": lambda: LiveReaders(layout).versions(),
    }
    deadline = time.monotonic() + seconds
    print("waiting", flush=True)
    while signs and time.monotonic() < deadline:
        for name in [name for name, is_seen in signs.items() if is_seen()]:
            del signs[name]
            print(f"{name}\t{time.time()}", flush=True)
        time.sleep(POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
