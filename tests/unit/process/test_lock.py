import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from trivet.config.layout import RunLayout
from trivet.errors import NodesMissing, RunDirectoryBusy, TrivetError
from trivet.process.lock import FileLock, LockWait, hold_role, holder_of, lock_directory, remove_if_free


class Clock:
    """A clock that only `sleep` moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def assert_refused(lock: FileLock, error: type[TrivetError] = RunDirectoryBusy, *, match: str = "in use") -> None:
    with pytest.raises(error, match=match), lock:
        pass


def test_a_second_holder_is_refused_and_learns_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder_of(path) is None
    for _ in range(2):  # it can be taken again
        with FileLock(path, what="this place"):
            assert holder_of(path) == os.getpid()
            message = rf"this place is in use by the run with pid {os.getpid()}, started \d{{4}}-"
            assert_refused(FileLock(path, what="this place"), match=message)
        assert holder_of(path) is None


def test_a_holder_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    first = FileLock(tmp_path / "lock", what="this place")
    first.__enter__()
    with FileLock(tmp_path / "lock", what="this place", wait=LockWait(timeout_s=10.0), sleep=lambda _: first.close()):
        pass


def test_waiting_ends_at_its_deadline_and_names_the_holder_once_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with FileLock(tmp_path / "lock", what="this place"):
        wait = LockWait(timeout_s=2.0)
        assert_refused(FileLock(tmp_path / "lock", what="this place", wait=wait, clock=clock, sleep=clock.sleep))
    assert 2.0 <= clock.now < 3.0
    (message,) = caplog.messages
    assert str(os.getpid()) in message


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    path = RunLayout(tmp_path).role_lock("trainer")
    program = (
        "import sys, time; from pathlib import Path; from trivet.process.lock import hold_role\n"
        "hold_role(Path(sys.argv[1]), is_over_nodes=False).__enter__(); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert holder_of(path) == holder.pid
        holder.kill()
    with hold_role(path, is_over_nodes=True):
        pass


def test_a_wait_may_end_with_another_error_and_leaves_the_lock_alone(tmp_path: Path) -> None:
    path, wait = tmp_path / "lock", LockWait(timeout_s=0.0, error=NodesMissing)
    with FileLock(path, what="this place"):
        message = rf"in use by the run with pid {os.getpid()}"
        assert_refused(FileLock(path, what="this place", wait=wait), NodesMissing, match=message)
    assert holder_of(path) is None


def test_over_nodes_a_role_waits_for_the_lock_of_a_machine_that_died_and_may_be_started_again(tmp_path: Path) -> None:
    """An NFSv4 server keeps the locks of a client that died for 90 s."""
    clock, path = Clock(), RunLayout(tmp_path).role_lock("orchestrator")
    with hold_role(path, is_over_nodes=False):
        late = hold_role(path, is_over_nodes=True)
        late._clock, late._sleep = clock, clock.sleep
        with pytest.raises(NodesMissing, match="the orchestrator's place") as error:
            late.__enter__()
    assert clock.now > 90.0
    assert error.value.exit_code == 75


def test_removing_the_file_lets_nobody_in(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock", what="this place", guards=tmp_path):
        (tmp_path / "lock").unlink()
        assert_refused(FileLock(tmp_path / "lock", what="this place", guards=tmp_path))
    with FileLock(tmp_path / "lock", what="this place", guards=tmp_path):
        pass


@pytest.mark.parametrize(("node", "where"), [("host-b", " on host-b"), (os.uname().nodename, "")])
def test_a_holder_on_another_machine_is_named_with_it(node: str, where: str, tmp_path: Path) -> None:
    """A process id alone would have the user end a process of this machine that has nothing to do with it."""
    with FileLock(tmp_path / "lock", what="this place"):
        record = msgspec.json.decode((tmp_path / "lock").read_bytes())
        assert record["node"] == os.uname().nodename
        (tmp_path / "lock").write_bytes(msgspec.json.encode(record | {"pid": 17, "node": node}))
        message = rf"pid 17{where}, started 20.* stop it \(kill 17{where}\)"
        assert_refused(FileLock(tmp_path / "lock", what="this place"), match=message)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 2 host",
        '{"pid":1}',
        '{"pid":1,"node":"\\u001b[2J","command":"","started":1}',
        '{"pid":1e9000,"node":"a"}',
        "\udcff",
    ],
)
def test_a_file_with_something_else_in_it_tells_no_holder(text: str, tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock", what="this place"):
        (tmp_path / "lock").write_bytes(text.encode(errors="surrogateescape"))
        assert holder_of(tmp_path / "lock") == 0
        assert_refused(FileLock(tmp_path / "lock", what="this place"), match="started unknown")


def test_a_directory_that_its_owner_has_locked_is_not_removed(tmp_path: Path) -> None:
    directory, removed = tmp_path / "scratch", list[Path]()
    directory.mkdir()
    lock = lock_directory(directory)
    remove_if_free(directory, before=removed.append)
    assert (directory.exists(), removed) == (True, [])
    os.close(lock)
    remove_if_free(directory, before=removed.append)
    assert (directory.exists(), removed) == (False, [directory])
