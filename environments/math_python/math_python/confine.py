"""Confines the process that runs a model's code. `sandbox` starts it as a program; the environment never imports what it does.

There are three processes. The supervisor ends when nothing of the code is left; SIGTERM, or the end of its parent, makes it end the
code. The keeper gives up its rights and forks the process of the code. With namespaces the keeper is the first process of a PID
namespace: the code cannot signal it, and when it ends, the kernel ends every process in there, however it was started. Without
namespaces the supervisor adopts what the code leaves behind, and ends it.

Every call of the tool starts this program, so it imports little. `_signal` has the functions of `signal` without its enumerations,
whose import takes longer than making the namespaces.

The supervisor exits with 0, with 128 + N when signal N ended the code, or with a code below that names its own failure.
"""

import _signal as signal  # type: ignore[import-not-found]  # it has no stub
import ctypes
import gc
import os
import resource
import sys
import time

NOT_CONFINED = 100
"""Exit code: the code was not run, because a step before it failed. stderr says which."""
NOT_ENDED = 101
"""Exit code: processes of the code could not be ended."""
ENDED_BY_SIGNAL = 128

MAX_TMP_BYTES = 16 * 2**20
"""All files together that the code may write where it has namespaces; they count as memory of the machine."""
_MAX_TMP_FILES = 1000
_MAX_OPEN_FILES = 64
_MAX_PROCESSES = 16
"""Processes and threads of one call, the keeper and the code included: a fork bomb ends here."""
_END_TIMEOUT_S = 5.0
_END_INTERVAL_S = 0.002

NOBODY = 65534
"""The user and group that the code runs as where possible, in namespaces the name that it sees of its own."""
_VISIBLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
"""Libraries and programs. Python's own directories are added."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

# <linux/sched.h>
_NEW_MOUNTS, _NEW_HOSTNAME, _NEW_IPC, _NEW_USERS, _NEW_PIDS, _NEW_NETWORK = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
# <linux/mount.h>
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
# <linux/prctl.h>
_SET_PDEATHSIG, _SET_DUMPABLE, _DROP_FROM_BOUNDING_SET, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_CAPABILITY_VERSION = 0x20080522
_MAX_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def confine(parent: int, has_namespaces: int, changes_user: int, memory_bytes: int, cpu_s: int, file_bytes: int) -> None:
    """Return in the process that is to run the code; every other process of this program ends in here.

    Args:
        parent: pid of the process whose end ends the code.
        has_namespaces: 1: the code gets namespaces of its own; 0: limits and fewer rights alone.
        changes_user: 1: the code runs as nobody. Only root can ask for that.
    """
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    os.umask(0o022)  # directories above those of Python are made here, and nobody must pass through them
    sys.executable = os.path.realpath(sys.executable)  # a virtual environment's link leads out of what the code can see
    max_processes = _MAX_PROCESSES
    try:
        if has_namespaces:
            _enter_namespaces(changes_user=bool(changes_user))
        else:
            _call("prctl", _SET_SUBREAPER, 1, 0, 0, 0)
            max_processes += _count_threads()  # the kernel counts all that the user runs
        _call("prctl", _SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(NOT_CONFINED)
        alive, held = os.pipe()
        gc.freeze()  # memory that nothing writes to is not copied by the forks
        keeper = os.fork()
    except OSError as exc:
        os._exit(_report(exc))
    if keeper:
        os._exit(_supervise(keeper, ends_rest=not has_namespaces))
    try:
        os.close(held)
        os.setsid()
        _give_up_rights(changes_user=bool(changes_user))
        _call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if _has_ended(alive):  # the supervisor, before this process was tied to it
            os._exit(NOT_CONFINED)
        for limit, value in limits.items():
            _limit(limit, value)
        code = os.fork()
    except OSError as exc:
        os._exit(_report(exc))
    if code:
        os._exit(_wait_for(code))
    _call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if has_namespaces and changes_user:
        try:
            _call("unshare", _NEW_USERS)
        except OSError:
            pass  # processes are counted for all that nobody runs, not for this call alone
        _drop_capabilities()
    _limit(resource.RLIMIT_NPROC, max_processes)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})


def _enter_namespaces(*, changes_user: bool) -> None:
    """Reduce the files to libraries, Python and an empty /tmp, remove the network, and give the next fork PIDs of its own."""
    namespaces = _NEW_MOUNTS | _NEW_HOSTNAME | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK
    if changes_user:
        _call("unshare", namespaces)
    else:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", namespaces | _NEW_USERS)
        for file, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(text)
    root = os.getcwd()
    _mount(None, "/", flags=_RECURSIVE | _PRIVATE)
    options = f"mode=755,size={MAX_TMP_BYTES},nr_inodes={_MAX_TMP_FILES}"
    _mount("tmpfs", root, kind="tmpfs", flags=_NO_SUID | _NO_DEVICES, options=options)
    for path in (sys.base_prefix, sys.base_exec_prefix, *_VISIBLE):
        _show(path, root=root)
    for point in _mount_points(below=root):
        kept = os.statvfs(point).f_flag & (_NO_SUID | _NO_DEVICES | _NO_EXEC)
        _mount(None, point, flags=_REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | kept)
    for path in _DEVICES:
        _show(path, root=root)
    os.mkdir(f"{root}/tmp")
    os.chmod(f"{root}/tmp", 0o1777)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _DETACH)  # what was the root directory lies on top of the new one
    os.chdir("/tmp")


def _show(path: str, *, root: str) -> None:
    """Make `path` visible below `root`, with all that is mounted in it."""
    target = root + path
    if os.path.lexists(target) or not os.path.exists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, flags=_BIND | _RECURSIVE)


def _mount_points(*, below: str) -> list[str]:
    with open("/proc/self/mountinfo", "rb") as opened:  # a space is written \040 there
        points = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in opened]
    return [point for point in points if point.startswith(f"{below}/")]


def _has_ended(pipe: int) -> bool:
    """Return whether no process holds the other end of `pipe`, and close it."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False
    finally:
        os.close(pipe)


def _give_up_rights(*, changes_user: bool) -> None:
    for capability in range(_MAX_CAPABILITIES):  # root would get them back with the next program that it starts
        _libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    if changes_user:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _drop_capabilities()
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)  # the code must not trace the keeper


def _drop_capabilities() -> None:
    _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())


def _limit(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _supervise(keeper: int, *, ends_rest: bool) -> int:
    """Wait for the keeper, and end it when asked to. Returns this process's exit code."""
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            os.kill(keeper, signal.SIGKILL)
        if os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    if ends_rest:
        try:
            os.killpg(keeper, signal.SIGKILL)
        except ProcessLookupError:
            pass
    outcome = _outcome(os.waitpid(keeper, 0)[1])
    return outcome if not ends_rest or _end_descendants() else NOT_ENDED


def _outcome(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else ENDED_BY_SIGNAL - code


def _wait_for(code: int) -> int:
    """Reap all that ends until the code has ended. Returns 0 whatever the code's own exit code is."""
    while True:
        pid, status = os.wait()
        if pid == code:
            return ENDED_BY_SIGNAL + os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _end_descendants() -> bool:
    """Kill the children, then those whom they leave to this process, until none is left. Returns whether that succeeded."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        for child in _children():
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_END_INTERVAL_S)
    return False


def _children() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _parent_of(entry) == os.getpid()]


def _parent_of(pid: str) -> int:
    """Return 0 when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as opened:
            return int(opened.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _count_threads() -> int:
    """Count the threads of all users of this machine."""
    with open("/proc/loadavg") as opened:
        return int(opened.read().split()[3].split("/")[1])


def _mount(source: str | None, target: str, *, kind: str | None = None, flags: int, options: str | None = None) -> None:
    encoded = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    _call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3], about=target)


def _call(name: str, *arguments: object, about: str = "") -> None:
    """Call a function of the C library that returns 0 when it succeeds.

    Raises:
        OSError: the call failed.
    """
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} failed{f' on {about}' if about else ''}: {os.strerror(number)}")


def _report(error: OSError) -> int:
    """Write why the code is not run; returns the exit code that says so."""
    os.write(2, f"{error.strerror or error}\n".encode())
    return NOT_CONFINED
