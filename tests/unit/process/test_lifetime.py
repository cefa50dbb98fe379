import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.processes import wait_until
from trivet.process.lifetime import descendants, end_session, module_command, process_exists, read_processes, tied_command

_PARENT = """
import os, subprocess, sys
from trivet.process.lifetime import tied_command
child = subprocess.Popen(tied_command(["sleep", "60"]))
print(child.pid, flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
os._exit(0)
"""


def run_parent(mode: str) -> int:
    """Start a process that starts a tied one. Return the pid of the tied one once both should be gone."""
    with subprocess.Popen([sys.executable, "-c", _PARENT, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if mode == "wait":
            parent.kill()
        parent.communicate()  # ends when the last holder of the pipe has: the tied process inherited it
    return pid


def assert_gone(pid: int) -> None:
    wait_until(lambda: _has_ended(pid), timeout_s=5, waiting_for=f"process {pid} to end")


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # nobody has waited for it yet
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("mode", ["wait", "leave"], ids=["killed later", "ended before the tie"])
def test_a_tied_process_ends_with_its_parent(mode: str) -> None:
    assert_gone(run_parent(mode))


def test_a_process_becomes_its_command_with_the_same_pid_and_exit_code() -> None:
    command = tied_command(["sh", "-c", "echo $$; exit 7"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate()
    assert (int(out), process.returncode) == (process.pid, 7)


def test_the_wrong_parent_ends_the_process_at_once() -> None:
    ended = subprocess.run(module_command("trivet.process.lifetime", "--parent", "1", "sh", "-c", "exit 0"), check=False)
    assert ended.returncode == -signal.SIGKILL


_FORKER = """
import os, sys, threading, time
from trivet.process.lifetime import tie_forks
tie_forks()

def say(words):
    os.write(1, f"{words}\\n".encode())  # one write, which a pipe keeps whole beside the other process's; print makes two

def fork():
    if os.fork() == 0:
        say(os.getpid())
        time.sleep(60)
        os._exit(0)

if sys.argv[1] == "main":
    fork()
else:
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    say("thread ended")
time.sleep(60)
"""


@pytest.mark.parametrize("origin", ["main", "thread"])
def test_a_fork_ends_with_the_process_that_made_it_and_outlives_a_thread(origin: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _FORKER, origin], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline().strip() for _ in range(1 if origin == "main" else 2)}
        (pid,) = (int(line) for line in lines if line.isdigit())
        if origin == "thread":
            assert "thread ended" in lines
            assert not _has_ended(pid)
            os.kill(pid, signal.SIGKILL)
        process.kill()
    assert_gone(pid)


def test_descendants_leave_out_those_that_are_spared_and_their_children() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE) as process:
        wait_until(lambda: len(descendants(process.pid)) == 1, timeout_s=20, waiting_for="the grandchild")
        assert process.pid in descendants(os.getpid())
        spared = descendants(os.getpid(), spared=[process.pid])
        assert not {process.pid, *descendants(process.pid)} & set(spared)
        process.communicate(b"\n", timeout=20)


def test_a_process_is_found_stopped_in_its_session_until_it_was_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert process_exists(process.pid)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: read_processes()[process.pid].state == "T", timeout_s=20, waiting_for="the stop")
    assert read_processes()[os.getpid()].session == os.getsid(0)
    assert end_session(process.pid) == 1
    process.communicate(timeout=20)
    assert not process_exists(process.pid)
    assert not process_exists(2**70)


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


@pytest.mark.parametrize(("how", "outlives"), [("by hand", True), ("tied", False)])
def test_ranks_that_a_user_started_outlive_the_shell_and_the_launchers_do_not(how: str, outlives: bool, tmp_path: Path) -> None:
    (tmp_path / "some_rank.py").write_text(RANK)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", STARTER, how], cwd=tmp_path, env=environ, timeout=60, check=True)
    if outlives:
        wait_until((tmp_path / "ended").exists, timeout_s=20, waiting_for="the rank's end")
    else:
        time.sleep(1.5)  # the rank would end by itself before
        assert not (tmp_path / "ended").exists()
