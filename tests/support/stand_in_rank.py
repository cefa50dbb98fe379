"""A trainer rank without its work: `python -m support.stand_in_rank BEHAVIOUR`, alone or with others.

It writes `rank_RANK.up`, or `rank_alone.up`. `wait` waits to be ended; a number is the exit code of rank 1 and of a rank alone.
"""

import os
import signal
import sys
from pathlib import Path


def main() -> int:
    [behaviour] = sys.argv[1:]
    rank = os.environ.get("RANK", "alone")
    path = Path(f"rank_{rank}.up")
    told = [os.environ.get(name, "-") for name in ("WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")]
    path.with_suffix(".tmp").write_text(" ".join(told))
    path.with_suffix(".tmp").rename(path)
    if behaviour == "wait":
        signal.pause()
    return int(behaviour) if rank in ("1", "alone") else 0


if __name__ == "__main__":
    raise SystemExit(main())
