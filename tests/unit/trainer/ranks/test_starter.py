"""Test the exit code of ranks, and that signals reach them. Programs of the shell stand in for ranks."""

import os
import signal
import subprocess
import sys

import pytest

from support.processes import heed_signals
from trivet.trainer.ranks.starter import await_ranks

PROGRAM = """
import signal, subprocess, sys
from trivet.trainer.ranks.starter import await_ranks
ranks = [subprocess.Popen(["sh", "-c", words], stdout=sys.stderr) for words in sys.argv[1:]]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
print("started", flush=True)
raise SystemExit(await_ranks(ranks))
"""


def start(*ranks: str) -> "subprocess.Popen[str]":
    starter = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *ranks], stdout=subprocess.PIPE, text=True, preexec_fn=heed_signals
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == "started\n"
    return starter


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        (["exit 0", "exit 0"], 0),
        (["exec sleep 600", "exit 3"], 3),
        (["exit 3", "trap 'exit 5' TERM; while :; do sleep 0.1; done"], 3),
        (["exec sleep 600", "kill -KILL $$"], 128 + signal.SIGKILL),
    ],
)
def test_the_code_of_the_rank_that_failed_first_is_kept_and_the_others_end(ranks: list[str], code: int) -> None:
    with start(*ranks) as starter:
        assert starter.wait(20) == code


def test_of_ranks_that_failed_at_one_moment_the_one_that_lost_another_says_less() -> None:
    ended = [subprocess.Popen(["sh", "-c", f"exit {code}"]) for code in (1, 3, 1)]
    for rank in ended:
        rank.wait(20)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        assert await_ranks(ended) == 3
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_becomes_the_code(number: signal.Signals) -> None:
    with start("exec sleep 600", "exec sleep 600") as starter:
        os.kill(starter.pid, number)
        assert starter.wait(20) == 128 + number
