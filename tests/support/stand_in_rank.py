"""A trainer rank without its work: `python -m support.stand_in_rank BEHAVIOUR` under torchrun.

`wait` waits to be ended; a number is the exit code of rank 1.
"""

import os
import signal
import sys
from pathlib import Path


def main(behaviour: str) -> int:
    rank = os.environ["RANK"]
    Path(f"rank_{rank}.up").write_text(
        f"{os.environ['WORLD_SIZE']} {os.environ['MASTER_ADDR']} {os.environ['OMP_NUM_THREADS']}"
    )
    if behaviour == "wait":
        signal.pause()
    return int(behaviour) if rank == "1" else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
