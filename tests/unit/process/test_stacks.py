import signal
import subprocess
import sys

import pytest

from trivet.process.lifetime import tied_command
from trivet.process.stacks import STACKS_SIGNAL

BLOCKED = """
import os, threading, time
from trivet.process.stacks import STACKS_SIGNAL, show_stacks_on_signal
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
from trivet.process.stacks import STACKS_SIGNAL, show_stacks_on_signal, show_tasks_on_signal
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
    said = run(BLOCKED)
    assert "in in_the_main_thread" in said
    assert "in in_the_other_thread" in said


def test_a_task_is_shown_with_its_name_and_all_that_it_awaits() -> None:
    said = run(AWAITING)
    assert said.count("  group-7\n") == 2, "it can be asked again"
    _, _, task = said.partition("  group-7\n")
    assert [line.rpartition(" in ")[2] for line in task.splitlines()[:3]] == ["run_a_group", "answers_of_a_server", "wait"]
    assert said.count("most recent call first") == 3, "the threads are shown too, also when the loop has ended"


@pytest.mark.parametrize("number", [STACKS_SIGNAL, signal.SIGTERM])
def test_a_process_that_does_not_listen_yet_ignores_what_it_is_asked(number: signal.Signals) -> None:
    program = f"import os, time; os.kill(os.getpid(), {int(number)}); time.sleep(0.1); print('went on')"
    tied = tied_command([sys.executable, "-c", program])
    done = subprocess.run(tied, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout == "went on\n") is (number == STACKS_SIGNAL)
