"""Locks a file, or a directory of temporary files, for one process at a time.

The launcher holds the lock of a run's directory. Trainer and orchestrator each hold a lock of their role in that directory. The
owner of a directory of temporary files locks it, so that a later process knows whether it may remove the directory. The kernel
releases a lock when its holder ends in any way. The locked file stays, and can be locked again.
"""

import errno
import fcntl
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from filelock import lock_descriptor

from trivet.errors import NodesMissing, RunDirectoryBusy, TrivetError
from trivet.shown_text import shorten

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.1
_REPORT_AFTER_S = 1.0
"""A wait that lasts longer is logged. Most waits are shorter, because the holder is about to end."""
_ROLE_WAIT_S = 10.0
"""Longest wait for the lock of a role, whose last process may have been killed a moment ago and still be ending."""
DEAD_MACHINE_S = 120.0
"""Longest wait when the machine of the holder may have died: an NFSv4 server keeps the locks of such a client for 90 s."""


class _Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a locked file. Values outside the limits show that the file is damaged."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    node: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,253}$")]
    command: str
    """The program's name without arguments, which may have secrets."""
    started: Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
    """Unix seconds."""


def _read_holder(path: Path) -> _Holder | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Holder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def holder_of(path: Path) -> int | None:
    """Return the process id of the holder of the FileLock of `path`: 0 if it is unknown, None if the lock is free."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A shared lock, because NFS gives no exclusive lock on a file that is open for reading. filelock has no shared locks.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read_holder(path)
        return holder.pid if holder is not None else 0
    finally:
        os.close(file)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockWait:
    """The longest wait for a lock that another process holds, and the error after it."""

    timeout_s: float = 0.0
    error: Callable[[str], TrivetError] = RunDirectoryBusy
    """Makes the error that is raised after that time, from a text that names the holder."""


class FileLock:
    """A lock of a file. The content of the file describes the holder."""

    def __init__(
        self,
        path: Path,
        *,
        what: str,
        guards: Path | None = None,
        wait: LockWait = LockWait(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Lock nothing yet.

        Args:
            what: the name of the locked thing in the error message.
            guards: a directory that is locked too, so that removing the file does not free the lock. On file systems that cannot
                lock directories, such as NFS, only the file is locked.
        """
        self._path = path
        self._what = what
        self._guards = guards
        self._wait = wait
        self._clock = clock
        self._sleep = sleep
        self._files: list[int] = []
        """Descriptors of the file and the directory."""
        self._holder: _Holder | None = None
        """This process, once it has the lock."""

    def __enter__(self) -> "FileLock":
        """Take the lock.

        Raises:
            RunDirectoryBusy: a live process holds it. `wait` may name another error.
            OSError: the file cannot be written.
        """
        self._files.append(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        try:
            if self._guards is not None:
                self._files.append(_open_directory(self._guards))
            started, is_reported = self._clock(), False
            while not self._try_lock():
                waited_s = self._clock() - started
                if waited_s >= self._wait.timeout_s:
                    raise self._wait.error(self._describe_holder())
                if waited_s >= _REPORT_AFTER_S and not is_reported:
                    is_reported = True
                    logger.warning("waiting at most %.0f s: %s", self._wait.timeout_s, self._describe_holder())
                self._sleep(_POLL_INTERVAL_S)
        except BaseException:
            self.close()
            raise
        command = Path(sys.argv[0]).name
        self._holder = _Holder(pid=os.getpid(), node=os.uname().nodename, command=command, started=time.time())
        os.ftruncate(self._files[0], 0)
        os.write(self._files[0], msgspec.json.encode(self._holder) + b"\n")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. May be called again."""
        while self._files:
            os.close(self._files.pop())

    def touch(self) -> None:
        """Change the file's time, as a sign that its file system answers. Call it while this process holds the lock.

        Raises:
            RunDirectoryBusy: another process has the lock: the file system gave it away while this one was cut off.
            OSError: the file system does not answer.
        """
        os.utime(self._path)
        if _read_holder(self._path) not in (self._holder, None):
            raise RunDirectoryBusy(self._describe_holder())

    def keep_over_exec(self) -> None:
        """Keep the lock for the program that replaces this process."""
        for descriptor in self._files:
            os.set_inheritable(descriptor, True)

    def _try_lock(self) -> bool:
        """Try to lock the file and the directory. Return whether this process holds the lock now."""
        for descriptor in self._files:
            try:
                if not lock_descriptor(descriptor, blocking=False):
                    return False
            except OSError as exc:
                if descriptor == self._files[0] or exc.errno not in (errno.EBADF, errno.EOPNOTSUPP, errno.ENOLCK):
                    raise
        return True

    def _describe_holder(self) -> str:
        holder, pid, where, since = _read_holder(self._path), "unknown", "", "unknown"
        if holder is not None:
            pid, where = str(holder.pid), f" on {holder.node}" if holder.node != os.uname().nodename else ""
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
            since += f" as {shorten(holder.command)}" if holder.command else ""
        return (
            f"{self._what} is in use by the run with pid {pid}{where}, started {since}; "
            f"wait for it, stop it (kill {pid if holder else 'PID'}{where}), or choose another output_dir"
        )


def _open_directory(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)


def lock_directory(directory: Path, *, is_shared: bool = False) -> int:
    """Lock `directory` and return a file descriptor. The lock lasts until it is closed, or the process ends in any way.

    Args:
        is_shared: others may lock it in this way too. Nobody can remove it meanwhile (`remove_if_free`).

    Raises:
        OSError: another process has locked it, or it is not a directory.
    """
    file = _open_directory(directory, os.O_NOFOLLOW)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def remove_if_free(directory: Path, *, before: Callable[[Path], object] = lambda _: None) -> None:
    """Remove a directory with its content, if it belongs to this user and no process has locked it.

    Args:
        before: called with the directory before it is removed.
    """
    try:
        file = lock_directory(directory)
    except OSError:  # it does not exist, or the process that uses it still runs
        return
    try:
        if os.fstat(file).st_uid == os.getuid():
            before(directory)
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(file)


def hold_role(path: Path, *, is_over_nodes: bool) -> FileLock:
    """Return the lock of a role. It prevents that two trainers, started by hand, work in one output directory.

    In a run over nodes, the machine of the role's last process may have died, and the file system may keep its lock for a while. So
    the role waits. If the lock stays, the role ends with an exit code after which the launcher starts it again.

    Args:
        path: the file that is locked, `RunLayout.role_lock`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    role = path.suffix.removeprefix(".")
    wait = LockWait(timeout_s=DEAD_MACHINE_S, error=NodesMissing) if is_over_nodes else LockWait(timeout_s=_ROLE_WAIT_S)
    return FileLock(path, what=f"the {role}'s place in output_dir {str(path.parent)!r}", wait=wait)
