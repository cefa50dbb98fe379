"""Real gloo ranks that run a function of a test's file, in processes of their own.

Importing torch and transformers takes several seconds of CPU. One process, this module as a program, therefore imports the test's
file, and each rank is a fork of it. It ends with the ranks' exit codes as one line of JSON on its stdout.
"""

import ctypes
import inspect
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.processes import find_free_port
from support.scripts import load_module

TIMEOUT_S = 1200.0
_TESTS = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1


def run_ranks(
    num_ranks: int,
    function: Callable[..., None],
    words: Sequence[str] = (),
    *,
    logs: Path,
    codes: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Start the ranks, and return when all have ended as expected.

    Args:
        function: what each rank calls with `words`, at the top level of a file.
        logs: directory of what each rank prints.
        codes: the exit code of each rank; None: all end well.
        variables: added to the environment of each rank.
    """
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment = {
        **os.environ,
        **common,
        **threads,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(_TESTS),
        **(variables or {}),
    }
    files = [logs / f"rank_{rank}_of_{num_ranks}.log" for rank in range(num_ranks)]
    starter_log = logs / f"starter_of_{num_ranks}.log"
    place = [inspect.getfile(function), function.__name__]
    command = [sys.executable, "-m", "support.ranks", str(num_ranks), *place, str(logs), *words]
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


def _become_rank(rank: int, call: Callable[[], None], log: Path) -> None:
    """Make the call in this process, which is a fork, and end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    code = 1
    try:
        call()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main(num_ranks: str, path: str, name: str, logs: str, *words: str) -> None:
    function = getattr(load_module(Path(path)), name)
    pids: list[int] = []
    for rank in range(int(num_ranks)):
        pid = os.fork()
        if pid == 0:
            _become_rank(rank, lambda: function(*words), Path(logs) / f"rank_{rank}_of_{num_ranks}.log")
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
