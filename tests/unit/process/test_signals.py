import asyncio
import os
import signal
import subprocess
import sys

import pytest

from trivet.process.event_loop import run_until_signalled
from trivet.process.lifetime import tied_command
from trivet.process.signals import STACKS_SIGNAL, Interrupts

BLOCKED = """
import os, threading, time
from trivet.process.signals import STACKS_SIGNAL, show_stacks_on_signal
show_stacks_on_signal()
def in_the_other_thread():
    runs.set()
    held.wait()
runs, held = threading.Event(), threading.Event()
threading.Thread(target=in_the_other_thread, daemon=True).start()
runs.wait()
def in_the_main_thread():
    os.kill(os.getpid(), STACKS_SIGNAL)
in_the_main_thread()
"""
AWAITING = """
import asyncio, os
from trivet.process.event_loop import show_tasks_on_signal
from trivet.process.signals import STACKS_SIGNAL, show_stacks_on_signal
show_stacks_on_signal()
async def answers_of_a_server():
    await never_answered.wait()
    yield
async def run_a_group():
    async with asyncio.timeout(60):
        async for _ in answers_of_a_server():
            pass
async def main():
    global never_answered
    never_answered = asyncio.Event()
    show_tasks_on_signal()
    group = asyncio.create_task(run_a_group(), name="group-7")
    await asyncio.sleep(0)
    for _ in range(2):
        os.kill(os.getpid(), STACKS_SIGNAL)
        await asyncio.sleep(0.1)
    group.cancel()
asyncio.run(main())
os.kill(os.getpid(), STACKS_SIGNAL)
"""


def run(program: str) -> str:
    """Return what it wrote to stderr. It ended as if nothing had been asked of it."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_every_thread_is_shown() -> None:
    shown = run(BLOCKED)
    assert "in in_the_main_thread" in shown
    assert "in in_the_other_thread" in shown


def test_a_task_is_shown_with_its_name_and_all_that_it_awaits() -> None:
    shown = run(AWAITING)
    assert shown.count("  group-7\n") == 2, "it can be asked again"
    _, _, task = shown.partition("  group-7\n")
    assert [line.rpartition(" in ")[2] for line in task.splitlines()[:3]] == ["run_a_group", "answers_of_a_server", "wait"]
    assert shown.count("most recent call first") == 3, "the threads are shown too, also when the loop has ended"


@pytest.mark.parametrize("number", [STACKS_SIGNAL, signal.SIGTERM])
def test_a_process_that_does_not_listen_yet_ignores_what_it_is_asked(number: signal.Signals) -> None:
    program = f"import os, time; os.kill(os.getpid(), {int(number)}); time.sleep(0.1); print('went on')"
    tied = tied_command([sys.executable, "-c", program])
    done = subprocess.run(tied, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout == "went on\n") is (number == STACKS_SIGNAL)


def test_a_signal_that_the_starter_has_this_process_ignore_stays_ignored() -> None:
    """`nohup` starts a program so, which must outlive its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def work() -> int:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
            return 0

        assert asyncio.run(run_until_signalled(work())) == 0
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.first is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_is_kept_and_passed_on_and_the_handlers_are_put_back() -> None:
    before, sent = signal.getsignal(signal.SIGTERM), list[int]()
    with Interrupts(without={signal.SIGINT}) as interrupts:
        assert signal.getsignal(signal.SIGINT) is not interrupts._note
        assert interrupts.forward(sent.append, 0) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.first == signal.SIGTERM
        assert interrupts.forward(sent.append, interrupts.forward(sent.append, 0)) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert sent == [signal.SIGTERM]


@pytest.mark.parametrize(("later_s", "expected"), [(0.2, False), (1.5, True)])
def test_two_signals_at_once_are_one_that_came_twice(later_s: float, expected: bool) -> None:
    now = [0.0]
    with Interrupts(clock=lambda: now[0]) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = later_s
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.is_repeated is expected
        sent = list[int]()
        num_sent = interrupts.forward(sent.append, 0)
        interrupts.forward(sent.append, num_sent)
        assert sent == [signal.SIGTERM] * (2 if expected else 1), "each call sends one signal at most"
