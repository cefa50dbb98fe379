"""Real gloo ranks of a test's own program, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.processes import find_free_port

TIMEOUT_S = 1200.0
_TESTS = Path(__file__).parents[1]


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
        program: a file with a function `main`, which each rank calls. It is imported once for all ranks.
        words: of each rank's command line.
        logs: directory of what each rank says.
        codes: the exit code of each rank; None: all end well.
    """
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment = os.environ | common | threads | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(_TESTS)}
    files = [logs / f"rank_{rank}_of_{num_ranks}.log" for rank in range(num_ranks)]
    starter_log = logs / f"starter_of_{num_ranks}.log"
    command = [sys.executable, "-m", "support.rank_starter", str(num_ranks), str(program), str(logs), *words]
    with starter_log.open("wb") as log:
        starter = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    try:
        answer, _ = starter.communicate(timeout=timeout_s)
    finally:
        if starter.poll() is None:
            os.killpg(starter.pid, signal.SIGKILL)
            starter.wait()
    said = "\n".join(path.read_text()[-3000:] for path in (starter_log, *files) if path.exists())
    assert starter.returncode == 0, said
    assert json.loads(answer) == list(codes or [0] * num_ranks), said
