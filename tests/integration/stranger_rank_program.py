"""One rank of tests/integration/test_stranger_ranks.py. Rank 1 knows where the other rank listens, but not the run's secret.

Each rank writes to `rank_RANK.said` in the working directory how its world was opened.
"""

import os
from pathlib import Path

from trivet.errors import UnknownRank
from trivet.secret import RunSecret
from trivet.trainer.ranks import world


def main() -> int:
    rank = os.environ["RANK"]
    if rank == "1":
        world.read_secret = lambda path: RunSecret(bytes(32))
    try:
        with world.open_world(device="cpu", timeout_s=60):
            said = "opened"
    except UnknownRank as exc:
        said = str(exc)
    Path(f"rank_{rank}.said").write_text(said)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
