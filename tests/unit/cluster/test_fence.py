"""A node that the driver does not hear ends its processes before the driver starts others in their place."""

import subprocess
import sys
from pathlib import Path

from support.processes import wait_until
from trivet.cluster.fence import is_missed

_PROGRAM = """
import os, subprocess, sys, threading, time
from trivet.cluster.fence import Fence
missed = threading.Event()

def say(word):  # in one call, because two threads say something
    os.write(1, f"{word}\\n".encode())

stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
Fence(missed.is_set, lost_after_s=2.0, on_end=lambda: say("noted"))
time.sleep(0.5)
say("alive" if child.poll() is None else "ended")
missed.set()
say(child.wait(30))
late = subprocess.Popen(["sleep", "60"])  # a start that was under way
say(late.wait(30))
missed.clear()
time.sleep(0.5)
after = subprocess.Popen(["sleep", "60"])
time.sleep(0.5)
say("alive" if after.poll() is None else "ended")
after.kill()
"""


def test_a_driver_is_missed_after_half_of_the_time_after_which_it_counts_the_node_as_lost() -> None:
    assert not is_missed(100.0, lost_after_s=30.0, now=115.0)
    assert is_missed(100.0, lost_after_s=30.0, now=115.1)


def test_processes_end_while_the_driver_is_missed_and_may_run_again_after(tmp_path: Path) -> None:
    log = tmp_path / "fence.out"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=output, stderr=subprocess.STDOUT)
    wait_until(lambda: process.poll() is not None, timeout_s=60, waiting_for="the end of the program")
    lines = log.read_text().splitlines()
    assert sorted(lines) == sorted(["alive", "noted", "-9", "-9", "alive"]), lines
