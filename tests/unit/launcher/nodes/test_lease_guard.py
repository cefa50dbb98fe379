"""A first node whose main thread hangs in a file still ends its processes, and itself, when its lease has expired."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.processes import wait_until
from trivet.launcher.nodes.lease import HeadLease
from trivet.launcher.nodes.lease_guard import LeaseGuard
from trivet.process.lifetime import read_processes

HEAD = """
    import os, subprocess, sys
    from pathlib import Path
    from trivet.launcher.nodes import lease as module
    from trivet.launcher.nodes.lease import HeadLease
    from trivet.launcher.nodes.lease_guard import LeaseGuard

    module._SETTLE_S = 0.0
    directory = Path(sys.argv[1])
    (directory / "away").write_text("no directory")
    lease = HeadLease(directory / ".lease.json", lost_after_s=2.0)
    with LeaseGuard(lease, lost_after_s=2.0, orderly_end_s=0.1), lease:
        ignore = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        print(child.pid, flush=True)
        lease._path = directory / "away" / ".lease.json"  # renewals fail from now on
        os.mkfifo(directory / "hangs")
        open(directory / "hangs").read()  # as a log in a directory that does not answer
"""


def test_a_head_whose_main_thread_hangs_ends_its_processes_and_then_itself(tmp_path: Path) -> None:
    head = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HEAD), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, errors = head.communicate(timeout=15)
    assert head.returncode == 75, errors
    assert "could not renew its lease" in errors
    wait_until(lambda: not is_running(int(said)), timeout_s=10, waiting_for="the end of what ignores SIGTERM")


def is_running(pid: int) -> bool:
    entry = read_processes().get(pid)
    return entry is not None and entry.state != "Z"  # one that has ended may still wait for init


class FakeLease(HeadLease):
    """A lease whose end the test decides."""

    is_over = False

    @property
    def has_expired(self) -> bool:
        return self.is_over


class FakeMachine:
    """Records when this node's processes are ended, and this process."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def end_processes(self, timeout_s: float) -> None:
        self.calls.append(f"processes within {timeout_s:g} s")

    def end_this_process(self, exit_code: int) -> None:
        self.calls.append(f"exit {exit_code}")


@pytest.fixture
def lease(tmp_path: Path) -> FakeLease:
    return FakeLease(tmp_path / ".lease.json", lost_after_s=30.0)


def guard(lease: FakeLease, machine: FakeMachine, *, orderly_end_s: float) -> LeaseGuard:
    return LeaseGuard(
        lease,
        lost_after_s=30.0,
        orderly_end_s=orderly_end_s,
        end_processes=machine.end_processes,
        end_this_process=machine.end_this_process,
    )


def test_a_head_that_leads_is_left_alone(lease: FakeLease) -> None:
    machine = FakeMachine()
    with guard(lease, machine, orderly_end_s=0.0):
        pass
    assert machine.calls == []


def test_a_main_thread_that_ends_the_run_in_order_gets_the_time_for_it(lease: FakeLease) -> None:
    machine = FakeMachine()
    lease.is_over = True
    with guard(lease, machine, orderly_end_s=600.0):
        wait_until(lambda: machine.calls != [], timeout_s=15, waiting_for="the end of the processes")
    assert machine.calls == ["processes within 6 s"]


def test_a_main_thread_that_takes_too_long_is_not_waited_for(lease: FakeLease) -> None:
    machine = FakeMachine()
    lease.is_over = True
    with guard(lease, machine, orderly_end_s=0.0):
        wait_until(lambda: len(machine.calls) == 2, timeout_s=15, waiting_for="the end")
    assert machine.calls == ["processes within 6 s", "exit 75"]
