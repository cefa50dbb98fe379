import os
import signal
import subprocess
import sys
from pathlib import Path

from support.processes import wait_until
from trivet.process.process_table import descendants, process_exists, read_processes


def test_descendants_leave_out_those_that_are_spared_and_their_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE) as process:
        wait_until(lambda: len(descendants(process.pid)) == 1, timeout_s=20, waiting_for="the grandchild")
        family = descendants(os.getpid())
        assert process.pid in family
        spared = descendants(os.getpid(), spared=[process.pid])
        assert not {process.pid, *descendants(process.pid)} & set(spared)
        process.communicate(b"\n", timeout=20)


def test_a_process_that_a_signal_stopped_is_found(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not read_processes()[process.pid].is_stopped
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: read_processes()[process.pid].is_stopped, timeout_s=20, waiting_for="the stop")
        process.send_signal(signal.SIGCONT)
        process.communicate(b"\n", timeout=20)


def test_a_process_knows_its_session() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        assert read_processes()[process.pid].session == process.pid
        assert read_processes()[os.getpid()].session == os.getsid(0)
        process.communicate(b"\n", timeout=20)


def test_a_process_exists_until_it_was_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_exists(process.pid)
    process.communicate(b"\n", timeout=20)
    assert not process_exists(process.pid)
    assert not process_exists(2**70)
