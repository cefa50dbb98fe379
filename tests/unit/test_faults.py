"""Faults happen where and when a schedule says, once per run. Without a schedule there are none."""

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from trivet import faults
from trivet.errors import ConfigError
from trivet.faults import Fault, FaultAction, Happened, Injector, Schedule, happened_directory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path):
    def write(*scheduled: Fault) -> Path:
        path = tmp_path / "faults.json"
        path.write_bytes(msgspec.json.encode(Schedule(seed=1, faults=list(scheduled))))
        return path

    return write


def fault(action: FaultAction, *, point: str = "commit.before", step: int = 3, **fields) -> Fault:
    return Fault(name="f", point=point, action=action, step=step, **fields)


def test_nothing_happens_unless_a_schedule_is_armed():
    faults.arm(None)
    assert faults.reach("commit.before", step=1) == 1


def test_a_fault_waits_for_its_step_and_happens_once_per_run(write):
    schedule = write(fault(FaultAction.DELAY, seconds=2.0))
    slept: list[float] = []
    for _ in range(2):  # a role and its restart
        injector = Injector(schedule, sleep=slept.append)
        for step in range(1, 6):
            injector.reach("commit.before", step=step)
            injector.reach("commit.after", step=step)
    assert slept == [2.0]
    (file,) = happened_directory(schedule).iterdir()
    record = msgspec.json.decode(file.read_bytes(), type=Happened)
    assert (record.name, record.step) == ("f", 3)


def test_a_fault_of_another_rank_does_not_happen(write):
    schedule = write(fault(FaultAction.NO_SPACE, rank=1))
    Injector(schedule, rank=0).reach("commit.before", step=3)
    with pytest.raises(OSError, match="No space left"):
        Injector(schedule, rank=1).reach("commit.before", step=3)


def test_a_full_disk_is_the_error_that_the_system_raises(write, tmp_path):
    with pytest.raises(OSError, match="No space left") as caught:
        Injector(write(fault(FaultAction.NO_SPACE))).reach("commit.before", step=3, path=tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))


@pytest.mark.parametrize(("action", "copies"), [(FaultAction.LOSE, 0), (FaultAction.DUPLICATE, 2)])
def test_a_message_is_lost_or_doubled(write, action, copies):
    injector = Injector(write(fault(action)))
    assert [injector.reach("commit.before", step=step) for step in (2, 3, 4)] == [1, copies, 1]


@pytest.mark.parametrize(
    ("action", "expected"), [(FaultAction.TRUNCATE, b"abc"), (FaultAction.FLIP, b"abc" + bytes([ord("d") ^ 1]) + b"ef")]
)
def test_the_largest_file_of_a_directory_is_damaged(write, tmp_path, action, expected):
    directory = tmp_path / "weights"
    directory.mkdir()
    (directory / "large").write_bytes(b"abcdef")
    (directory / "small").write_bytes(b"x")
    Injector(write(fault(action))).reach("commit.before", step=3, path=directory)
    assert (directory / "large").read_bytes() == expected
    assert (directory / "small").read_bytes() == b"x"


def test_the_wall_clock_jumps_and_the_monotonic_clock_does_not(write, monkeypatch):
    monkeypatch.setattr(time, "time", time.time)
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    wall, monotonic = time.time(), time.monotonic()
    Injector(write(fault(FaultAction.CLOCK_JUMP, seconds=3600.0))).reach("commit.before", step=3)
    assert time.time() - wall == pytest.approx(3600, abs=60)
    assert time.time_ns() / 1e9 - wall == pytest.approx(3600, abs=60)
    assert time.monotonic() - monotonic < 60


@pytest.mark.parametrize(("action", "number"), [(FaultAction.KILL, signal.SIGKILL)])
def test_a_process_kills_itself_and_its_restart_goes_on(write, action, number):
    schedule = write(fault(action))
    program = (
        "import sys; from pathlib import Path; from trivet import faults\n"
        "faults.arm(Path(sys.argv[1])); faults.reach('commit.before', step=3); print('survived')"
    )
    command = [sys.executable, "-c", program, str(schedule)]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=240, check=False) for _ in range(2))
    assert (first.returncode, first.stdout) == (-number, "")
    assert (second.returncode, second.stdout) == (0, "survived\n")


def test_a_point_that_does_not_exist_is_refused_with_those_that_do(write):
    with pytest.raises(ConfigError, match=r"'commit\.never'; the points are .*commit\.before"):
        Injector(write(fault(FaultAction.KILL, point="commit.never")))


@pytest.mark.parametrize(
    "content", [b'{"seed": 1}', b'{"seed": 1, "faults": [{"name": "\xff"}]}', b'{"faults": ' + b"[" * 100_000]
)
def test_a_schedule_that_cannot_be_read_is_refused(content, tmp_path):
    path = tmp_path / "faults.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"faults\.schedule = .*cannot be read"):
        faults.arm(path)


def test_every_point_is_reached_somewhere_and_none_besides():
    reached = set()
    for path in (ROOT / "src" / "trivet").rglob("*.py"):
        text = path.read_text()
        reached |= {part.split('"')[1] for part in text.split("reach(")[1:] if part.startswith('"')}
    assert reached == faults.POINTS
