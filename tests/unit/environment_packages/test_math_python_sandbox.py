"""Run attacks by model-written code on the process that runs it. Each must succeed without a sandbox."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import pytest

from support import code_runner
from support.processes import kill_all, wait_until

NOBODY = 65534
SECRET = f"planted-{os.getpid()}"
USERS = ("root", "nobody") if os.geteuid() == 0 else ("user",)
HOWS = ("isolated", "limited")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The attacked user, the confinement of the code, a home directory and a working directory."""

    user: str
    how: str
    place: Path

    def start(self, code: str, *, how: str = "", command: tuple[str, ...] = (), **limits: float) -> "subprocess.Popen[str]":
        asked = {"how": how or self.how, "code": code, "limits": {"timeout_s": 20.0, **limits}}
        process = subprocess.Popen(
            [*command, interpreter(), "-B", code_runner.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.place / "run",
            env={
                "PATH": os.defpath,
                "HOME": str(self.place / "home"),
                "TMPDIR": str(self.place / "tmp"),  # a parent that is killed leaves its temporary directories
                "PLANTED_KEY": SECRET,
            },
            user=NOBODY if self.user == "nobody" else None,
            group=NOBODY if self.user == "nobody" else None,
            extra_groups=[] if self.user == "nobody" else None,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        return process

    def run(self, code: str, *, how: str = "", command: tuple[str, ...] = (), **limits: float) -> str:
        """Return what the code printed, or why it was refused. None of its processes may be left."""
        process = self.start(code, how=how, command=command, **limits)
        answer = json.loads(process.communicate(timeout=120)[0])
        left = code_of(process.pid)
        kill_all(left)
        assert not left
        return answer.get("refused") or answer["result"].strip()


@cache
def interpreter() -> str:
    """Return an interpreter that every user of the tests may run."""
    for python in (sys.executable, "/usr/bin/python3"):
        looks = [python, "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        user = NOBODY if "nobody" in USERS else None
        try:
            if subprocess.run(looks, user=user, capture_output=True, check=False).returncode == 0:
                return python
        except PermissionError:
            continue
    pytest.skip("no Python 3.11 that the user nobody can run")


def code_of(parent: int) -> list[psutil.Process]:
    """Return the code of the processes that `parent`'s sandbox started, whoever their parent is now."""
    marker = f"{code_runner.PACKAGE} {parent} "
    return [each for each in psutil.process_iter(["cmdline"]) if marker in " ".join(each.info["cmdline"] or ())]


def processes_with(marker: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if marker in (each.info["cmdline"] or ())]


@pytest.fixture
def place() -> Iterator[Path]:
    """Make a directory outside pytest's own, which no other user may enter."""
    directory = make_place()
    yield directory
    shutil.rmtree(directory)


def make_place() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="trivet-test-"))
    directory.chmod(0o755)
    for name in ("home", "run", "tmp"):
        (directory / name).mkdir()
        (directory / name / "notes").write_text(SECRET)
    (directory / "tmp").chmod(0o1777)
    return directory


@cache
def missing(user: str, how: str) -> str:
    """Return why this machine cannot confine code of `user` in this way. Empty if it can."""
    place = make_place()
    said = Machine(user=user, how=how, place=place).run("6 * 7")
    shutil.rmtree(place)
    return "" if said == "42" else said


def machine_of(user: str, how: str, place: Path) -> Machine:
    if why := missing(user, how):
        pytest.skip(why)
    return Machine(user=user, how=how, place=place)


@pytest.fixture(params=[(user, how) for user in USERS for how in HOWS], ids=lambda pair: "-".join(pair))
def machine(request: pytest.FixtureRequest, place: Path) -> Machine:
    return machine_of(*request.param, place)


@pytest.fixture(params=USERS)
def isolated(request: pytest.FixtureRequest, place: Path) -> Machine:
    return machine_of(request.param, "isolated", place)


@pytest.fixture(params=USERS)
def limited(request: pytest.FixtureRequest, place: Path) -> Machine:
    return machine_of(request.param, "limited", place)


MARKER = f"3100.{os.getpid()}"
LEAVE_BEHIND = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        os.execvp("sleep", ["sleep", "{MARKER}"])
    os._exit(0)
os.wait()
"""
"""Forks twice: the process gets another session, and its parent is gone."""


READ_PROCESSES = f"""
import os
found = set()
for pid in os.listdir("/proc") if os.path.isdir("/proc") else ():
    if pid.isdigit():
        try:
            if b"PLANTED_KEY={SECRET}" in open(f"/proc/{{pid}}/environ", "rb").read():
                found.add("key")
        except OSError:
            pass
print(*found or ["nothing"])
"""


def test_the_environment_of_other_processes_cannot_be_read(machine: Machine) -> None:
    assert machine.run(READ_PROCESSES, how="unconfined") == "key"
    assert machine.run(READ_PROCESSES) == "nothing"


def read_memory(pid: str) -> str:
    """Return code that reads the environment of a process from its memory."""
    return f"""
import ctypes, os
pid = {pid}
try:
    with open(f"/proc/{{pid}}/maps") as maps, open(f"/proc/{{pid}}/mem", "rb", buffering=0) as memory:
        low, high = next(line.split()[0].split("-") for line in maps if "[stack]" in line)
        memory.seek(int(low, 16))
        print("key" if b"{SECRET}" in memory.read(int(high, 16) - int(low, 16)) else "memory")
except OSError:
    print("nothing")
print(ctypes.CDLL(None).ptrace(0x4206, pid, None, None))  # PTRACE_SEIZE
"""


def test_the_memory_of_the_parent_cannot_be_read(machine: Machine) -> None:
    assert machine.run(read_memory("os.getppid()"), how="unconfined").splitlines() == ["key", "0"]
    process = machine.start("import time\ntime.sleep(60)")
    try:
        wait_until(lambda: len(code_of(process.pid)) == 3, timeout_s=20, waiting_for="the code to start")
        assert machine.run(read_memory(str(process.pid))).splitlines() == ["nothing", "-1"]
    finally:
        process.kill()
        process.communicate()


def test_killing_the_parent_ends_the_code_and_what_it_left_behind(machine: Machine) -> None:
    process = machine.start(f"{LEAVE_BEHIND}\ntime.sleep(600)")
    wait_until(lambda: processes_with(MARKER), timeout_s=20, waiting_for="the code to start")
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_with(MARKER) and not code_of(process.pid), timeout_s=20, waiting_for="the code to end")


@pytest.mark.parametrize("ending", ["print('done')", "time.sleep(600)", "os.abort()"], ids=["ends", "waits", "crashes"])
def test_a_double_fork_does_not_outlive_the_call(machine: Machine, ending: str) -> None:
    output = machine.run(f"{LEAVE_BEHIND}\n{ending}", timeout_s=3.0)
    left = processes_with(MARKER)
    kill_all(left)
    assert not left
    assert output in ("done", "(ended: no end within 3 s)", "(ended: SIGABRT)")


def test_the_double_fork_would_outlive_a_plain_child(place: Path) -> None:
    Machine(user=USERS[0], how="unconfined", place=place).run(LEAVE_BEHIND)
    wait_until(lambda: processes_with(MARKER), timeout_s=20, waiting_for="the process that was left behind")
    kill_all(processes_with(MARKER))


def fork_bound(machine: Machine) -> int:
    """Return more processes than a call may start. Without namespaces the kernel counts every process of the user on the
    machine."""
    if machine.how == "isolated":
        return 32
    threads = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    if threads > 2000:
        pytest.skip(f"{threads} threads run on this machine: without namespaces a fork bomb may start as many")
    return 2 * threads + 64


def test_a_fork_bomb_is_bounded_and_ended(machine: Machine) -> None:
    code = """
import os, time
bound = {bound}
try:
    for count in range(bound):
        if os.fork() == 0:
            time.sleep(600)
    print("unbounded")
except OSError:
    print("bounded")
"""
    assert machine.run(code.format(bound=fork_bound(machine))) == "bounded"


def test_a_fork_bomb_that_does_not_stop_ends_with_its_time(machine: Machine) -> None:
    fork_bound(machine)
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    output = machine.run(bomb, timeout_s=1.0, cpu_s=2)
    assert output in ("(ended: no end within 1 s)", "(ended: more than 2 s of computing)")


def test_all_files_together_are_limited_in_memory(isolated: Machine) -> None:
    code = "for name in range(64):\n    open(str(name), 'w').write('x' * 2**20)"
    assert "No space left on device" in isolated.run(code)


def test_the_system_and_python_cannot_be_written(isolated: Machine) -> None:
    code = """
import os, sys
for directory in (sys.base_prefix, os.path.dirname(os.__file__), "/usr", "/usr/bin"):
    try:
        open(f"{directory}/planted", "w")
        print("written", directory)
    except OSError as exc:
        print(exc.strerror)
"""
    assert set(isolated.run(code).splitlines()) == {"Read-only file system"}


def test_rights_cannot_be_had_back(machine: Machine) -> None:
    code = """
import ctypes, os
print(os.getuid() == 0, ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, None))
for change in (os.setuid, os.setgid):
    try:
        change(0)
        print("root")
    except OSError:
        print("no")
"""
    assert machine.run(code).splitlines() == ["False -1", "no", "no"]


def read_files(place: Path) -> str:
    return f"""
for path in ("{place}/home/notes", "{place}/run/notes", "/proc/1/environ", "/etc/passwd"):
    try:
        print(open(path, "rb").read() != b"")
    except OSError as exc:
        print(type(exc).__name__)
"""


def test_files_of_the_user_and_of_the_system_cannot_be_read(isolated: Machine) -> None:
    assert isolated.run(read_files(isolated.place), how="unconfined").splitlines()[:2] == ["True", "True"]
    assert set(isolated.run(read_files(isolated.place)).splitlines()) == {"FileNotFoundError"}


def connect(port: int, name: str) -> str:
    return f"""
import _socket
for family, address in ((_socket.AF_INET, ("127.0.0.1", {port})), (_socket.AF_UNIX, "\\0{name}")):
    try:
        _socket.socket(family, _socket.SOCK_STREAM).connect(address)
        print("connected")
    except OSError:
        print("no")
"""


@pytest.fixture
def listening() -> Iterator[tuple[int, str]]:
    """Listen on a loopback port and on a name in the machine's abstract namespace."""
    name = f"trivet-test-{os.getpid()}"
    with closing(socket.create_server(("127.0.0.1", 0))) as server, closing(socket.socket(socket.AF_UNIX)) as named:
        named.bind(f"\0{name}")
        named.listen()
        yield server.getsockname()[1], name


def test_nothing_of_the_machine_can_be_connected_to(isolated: Machine, listening: tuple[int, str]) -> None:
    assert isolated.run(connect(*listening), how="unconfined").splitlines() == ["connected", "connected"]
    assert isolated.run(connect(*listening)).splitlines() == ["no", "no"]


def test_without_namespaces_files_and_sockets_stay_open_to_the_code(limited: Machine, listening: tuple[int, str]) -> None:
    """docs/security.md describes such machines. Users who cannot accept this set require_isolation."""
    assert limited.run(read_files(limited.place)).splitlines()[:2] == ["True", "True"]
    assert limited.run(connect(*listening)).splitlines() == ["connected", "connected"]


def test_root_runs_code_without_namespaces_as_nobody(place: Path) -> None:
    if "root" not in USERS:
        pytest.skip("needs root")
    (place / "home" / "notes").chmod(0o600)
    limited = machine_of("root", "limited", place)
    assert limited.run(read_files(place)).splitlines()[:2] == ["PermissionError", "True"]


def test_isolation_that_is_required_and_impossible_is_refused(place: Path) -> None:
    """A user namespace that may have no others refuses them, as a kernel does where they are switched off."""
    without = ("unshare", "--user", "--map-root-user", "sh", "-c")
    switch_off = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    if subprocess.run([*without, switch_off, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace can be made in which there are none")
    refused = Machine(user=USERS[-1], how="isolated", place=place).run("6 * 7", command=(*without, switch_off, "sh"))
    assert refused.startswith("require_isolation = true, but model-written code cannot be isolated on this machine: ")
    assert "sysctl -w user.max_user_namespaces=15000" in refused
    assert Machine(user=USERS[-1], how="any", place=place).run("6 * 7", command=(*without, switch_off, "sh")) == "42"
