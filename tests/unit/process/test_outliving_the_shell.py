"""A command that a user started with nohup outlives the shell; one that the launcher started ends with the launcher."""

import os
import subprocess
import sys
import time
from pathlib import Path

from support.processes import wait_until

RANK = """
import time
from pathlib import Path

def main():
    Path("started").touch()
    time.sleep(1)
    Path("ended").touch()
    return 0
"""
STARTER = """
import os, subprocess, sys, time
from trivet.process.lifetime import tied_command

command = [sys.executable, "-m", "trivet.trainer.ranks.starter", "1", "some_rank"]
subprocess.Popen(tied_command(command) if sys.argv[1] == "tied" else command)
while not os.path.exists("started"):
    time.sleep(0.01)
"""


def start(how: str, directory: Path) -> None:
    """Start a rank from a process that ends once the rank has started."""
    (directory / "some_rank.py").write_text(RANK)
    environ = {**os.environ, "PYTHONPATH": str(directory)}
    subprocess.run([sys.executable, "-c", STARTER, how], cwd=directory, env=environ, timeout=60, check=True)


def test_ranks_that_a_user_started_outlive_the_shell(tmp_path: Path) -> None:
    start("by hand", tmp_path)
    wait_until((tmp_path / "ended").exists, timeout_s=20, waiting_for="the rank's end")


def test_ranks_that_the_launcher_started_end_with_it(tmp_path: Path) -> None:
    start("tied", tmp_path)
    time.sleep(1.5)  # the rank would end by itself before
    assert not (tmp_path / "ended").exists()
