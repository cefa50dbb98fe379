"""Starts the ranks of a program by forking: `python -m support.rank_starter NUM_RANKS PROGRAM LOGS WORD…`.

Importing torch and transformers takes several seconds of CPU. Here one process imports the program, and each rank is a fork of it.
The starter ends with the ranks' exit codes as one line of JSON on its stdout. It is started by `support.ranks`.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from support.scripts import load_module

_PR_SET_PDEATHSIG = 1


def load_program(path: Path) -> object:
    """Import a program under its own name, by which it may be imported again."""
    sys.path.insert(0, str(path.parent))
    return load_module(path)


def become_rank(rank: int, program: object, log: Path) -> None:
    """Run the program in this process, which is a fork, and end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    code = 1
    try:
        program.main()  # type: ignore[attr-defined]  every program of ranks has it
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(argv: Sequence[str]) -> int:
    num_ranks, path, logs, *words = argv
    sys.argv = [path, *words]
    program = load_program(Path(path))
    pids: list[int] = []
    for rank in range(int(num_ranks)):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, program, Path(logs) / f"rank_{rank}_of_{num_ranks}.log")
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps(codes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
