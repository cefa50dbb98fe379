"""A trainer rank without its work: `python -m support.stand_in_rank BEHAVIOUR` under torchrun.

`wait` waits to be ended; a number is the exit code of rank 1.
"""

import os
import signal
import sys
from pathlib import Path


def main(behaviour: str) -> int:
    rank = os.environ["RANK"]
    path = Path(f"rank_{rank}.up")
    path.with_suffix(".tmp").write_text(" ".join(os.environ[name] for name in ("WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")))
    path.with_suffix(".tmp").rename(path)
    if behaviour == "wait":
        signal.pause()
    return int(behaviour) if rank == "1" else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
