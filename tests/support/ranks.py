"""Real gloo ranks of a test's own program, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.processes import find_free_port

TIMEOUT_S = 1200.0


def run_ranks(
    num_ranks: int,
    program: Path,
    words: Sequence[str],
    *,
    logs: Path,
    codes: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Start the ranks, and return when all have ended as expected.

    Args:
        words: of each rank's command line.
        logs: directory of what each rank says.
        codes: the exit code of each rank; None: all end well.
    """
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment = os.environ | common | threads | {"GLOO_SOCKET_IFNAME": "lo"}
    files = [logs / f"rank_{rank}_of_{num_ranks}.log" for rank in range(num_ranks)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, path in enumerate(files):
            with path.open("wb") as file:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, str(program), *words]
                ranks.append(subprocess.Popen(command, env=environment | own, stdout=file, stderr=subprocess.STDOUT))
        ended = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ended == list(codes or [0] * num_ranks), "\n".join(path.read_text()[-3000:] for path in files)
