"""Starts the ranks of this machine: `python -m trivet.trainer.ranks.starter NUM_RANKS MODULE ARGUMENT…`. Called by the launcher.

Torchrun is not used: its store listens on every interface, and its agent unpickles what it finds there. Ranks of one machine meet
at a file in a directory of this user's, those of several nodes at a port of the first (`process.sockets`). A rank ends with the
process that started it, however that ends. When one fails, the others are ended; the exit code is that of the rank that failed
first. A single rank runs in this process.
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
"""Stands for NUM_RANKS in the command of a rank that the starter of several has started."""
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
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the ranks inherit it: `_become_rank` lets Ctrl-C end them
        environments = [{**os.environ, **common, **_rank_variables(rank, place)} for rank in range(int(num_ranks))]
        return await_ranks([subprocess.Popen(command, env=environment) for environment in environments])


def _rank_variables(local_rank: int, place: RankPlace) -> dict[str, str]:
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
    """Wait for all ranks to end, ending the others when one fails or a signal arrives; return the exit code.

    It blocks the signals that it waits for, so the ranks must be started before.
    """
    stopping = ending_signals()
    awaited = {signal.SIGCHLD, *stopping}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    exit_code, kill_at = 0, float("inf")
    while running := [rank for rank in ranks if rank.poll() is None]:
        if not exit_code and (exit_code := _exit_code(ranks)):
            kill_at = _end(running, signal.SIGTERM)
        if time.monotonic() >= kill_at:
            kill_at = _end(running, signal.SIGKILL)
        left = min(max(kill_at - time.monotonic(), 0.0), _END_TIMEOUT_S)
        received = signal.sigtimedwait(awaited, left)
        if received is not None and received.si_signo in stopping:
            exit_code = exit_code or 128 + received.si_signo
            kill_at = _end(running, received.si_signo)
    return exit_code or _exit_code(ranks)


def _exit_code(ranks: Sequence[Rank]) -> int:
    """Return the code of the ranks that ended by themselves. A rank that lost another ends with 1, so any other code says more."""
    failed = [rank.returncode for rank in ranks if rank.returncode]
    code = max(failed, key=lambda code: code != 1, default=0)
    return code if code >= 0 else 128 - code


def _end(ranks: Sequence[Rank], number: int) -> float:
    """Send the signal; return the time, in monotonic seconds, at which ranks that are left are killed."""
    for rank in ranks:
        rank.send_signal(number)
    return time.monotonic() + _END_TIMEOUT_S


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
