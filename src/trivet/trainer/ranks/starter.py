"""Starts the ranks of this machine: `python -m trivet.trainer.ranks.starter NUM_RANKS MODULE ARGUMENT…`. Called by the launcher.

Torchrun is not used: its store listens on every interface, and its agent unpickles what it finds there. Ranks of one machine find
each other's addresses in a file that only this user can read. Ranks of several nodes find them at a port of the first node
(`process.sockets`). A rank ends with the process that started it, however that process ends. When one rank fails, the starter ends
the others, and its exit code is that of the failed rank. A single rank runs in this process.
"""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trivet.process.imports import importing
from trivet.process.lifetime import module_command, tied_command
from trivet.process.signals import ending_signals, ignore_stacks_signal
from trivet.process.sockets import RankPlace, read_place

RENDEZVOUS_FILE = "RANK_RENDEZVOUS_FILE"
"""Environment variable with the path of the file at which ranks of one machine meet (trainer.ranks.world)."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", RENDEZVOUS_FILE)
"""Environment variables that make a rank join others."""
_ONE_OF_SEVERAL = "rank"
"""Takes the position of NUM_RANKS in the command by which the starter starts each of several ranks."""
_END_TIMEOUT_S = 30.0
"""Longest time that ranks may take to end after a signal; then they are killed."""

Rank = subprocess.Popen[bytes]


def main(argv: Sequence[str]) -> int:
    """Run the ranks to their end; return the exit code, 128 + N when signal N ended them."""
    num_ranks, module, *arguments = argv
    if num_ranks == _ONE_OF_SEVERAL:
        return _become_rank(module, arguments)
    place = read_place()
    if num_ranks == "1":
        for name in _RANK_VARIABLES:
            os.environ.pop(name, None)
        if place is not None:
            os.environ.update(_rank_variables(0, place))
        ignore_stacks_signal()
        return _become_rank(module, arguments)
    with tempfile.TemporaryDirectory(prefix="trivet-ranks-", ignore_cleanup_errors=True) as scratch:
        common: dict[str, str] = {}
        if place is None:
            place = RankPlace(first_rank=0, num_ranks=int(num_ranks), host="", port=0, attempt=1)
            common[RENDEZVOUS_FILE] = str(Path(scratch) / "rendezvous")
        command = tied_command(module_command("trivet.trainer.ranks.starter", _ONE_OF_SEVERAL, module, *arguments))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # ranks inherit the mask until `_become_rank` unblocks Ctrl-C
        environments = [{**os.environ, **common, **_rank_variables(rank, place)} for rank in range(int(num_ranks))]
        return await_ranks([subprocess.Popen(command, env=environment) for environment in environments])


def _rank_variables(local_rank: int, place: RankPlace) -> dict[str, str]:
    """Return the environment variables of one rank. `place` has the first rank of this node and the number of all ranks."""
    rank = place.first_rank + local_rank
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(place.num_ranks)}


def _become_rank(module: str, arguments: Sequence[str]) -> int:
    """Run `main` of `module` in this process; return its exit code."""
    sys.argv = [module, *arguments]
    with importing():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        rank = importlib.import_module(module)
    return rank.main()


def await_ranks(ranks: Sequence[Rank]) -> int:
    """Wait for all ranks to end, and end the others when one fails or a signal arrives; return the exit code.

    It blocks the signals that it waits for, so the ranks must be started before.
    """
    end_signals = ending_signals()
    awaited = {signal.SIGCHLD, *end_signals}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    exit_code, kill_at = 0, float("inf")
    while running := [rank for rank in ranks if rank.poll() is None]:
        if not exit_code and (exit_code := _exit_code(ranks)):
            kill_at = _send_signal(running, signal.SIGTERM)
        if time.monotonic() >= kill_at:
            kill_at = _send_signal(running, signal.SIGKILL)
        timeout_s = min(max(kill_at - time.monotonic(), 0.0), _END_TIMEOUT_S)
        received = signal.sigtimedwait(awaited, timeout_s)
        if received is not None and received.si_signo in end_signals:
            exit_code = exit_code or 128 + received.si_signo
            kill_at = _send_signal(running, received.si_signo)
    return exit_code or _exit_code(ranks)


def _exit_code(ranks: Sequence[Rank]) -> int:
    """Return the exit code of the ranks that have ended; 0: none has failed. Code 1 counts last: losing another rank gives it."""
    failed = [rank.returncode for rank in ranks if rank.returncode]
    code = max(failed, key=lambda code: code != 1, default=0)
    return code if code >= 0 else 128 - code


def _send_signal(ranks: Sequence[Rank], number: int) -> float:
    """Send the signal; return the time, in monotonic seconds, at which ranks that still run are killed."""
    for rank in ranks:
        rank.send_signal(number)
    return time.monotonic() + _END_TIMEOUT_S


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
