"""Injects faults at named points of the program, for tests that prove that a run survives them.

A role calls `arm` at its start with the schedule that its configuration names. Without a schedule nothing happens. Modules call
`reach` at the points. Each fault of a schedule happens once per run: a file in a directory next to the schedule records it, so that
a restarted role does not repeat it.
"""

import errno
import os
import signal
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from trivet.errors import ConfigError
from trivet.storage.durable import DECODE_ERRORS

POINTS = frozenset(
    f"{name}.{moment}"
    for name, moments in {  # in the order of a step
        "dispatch": "before after",  # orchestrator: a group is drawn, its event is written
        "orchestrator_half": "before during after",  # orchestrator: its part of a checkpoint
        "batch_send": "before during after",  # orchestrator: before the first try, after a try, once acknowledged
        "batch_acknowledge": "before after",  # trainer: a message arrived, its reply goes out; it can be lost or doubled
        "optimizer_step": "before during after",  # trainer, every rank: during is between gradients and the step
        "weight_write": "before during after",  # trainer: before, between files and manifest, after the manifest
        "stable": "before after",  # trainer: around the renaming that makes a policy visible
        "trainer_half": "before during after",  # trainer, every rank: during is while the shards are written
        "commit": "before during after",  # trainer: during is between COMMITTED and the renaming
        "clean_up": "before after",  # trainer: around the removal of what nobody needs
        "reload": "before during after",  # inference: during is while the engine is paused
        "transfer": "init receive send",  # inference: before the workers connect, while they receive; every rank: before 64 MiB
    }.items()
    for moment in moments.split()
)

_real_time, _real_time_ns = time.time, time.time_ns


class FaultAction(StrEnum):
    """The kinds of faults."""

    KILL = "kill"
    """SIGKILL to this process."""
    STOP = "stop"
    """SIGSTOP to this process. The test that wrote the schedule sends SIGCONT."""
    DELAY = "delay"
    """Sleep for `seconds`. At batch_acknowledge this delays the message or its answer."""
    NO_SPACE = "no_space"
    """The write fails as on a full disk."""
    TRUNCATE = "truncate"
    """The largest file of the directory just written loses its second half."""
    FLIP = "flip"
    """One bit in the middle of the largest file of the directory just written is inverted."""
    LOSE = "lose"
    """The message, or its answer, does not arrive. Only at batch_acknowledge."""
    DUPLICATE = "duplicate"
    """The message, or its answer, arrives twice. Only at batch_acknowledge."""
    CLOCK_JUMP = "clock_jump"
    """The wall clock of this process is off by `seconds` from now on; the monotonic clock is not."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a schedule."""

    name: str
    """Unique in the schedule."""
    point: str
    action: FaultAction
    step: int = 0
    """The fault happens when the point is first reached in this step (or policy version), or in a later one."""
    rank: int = 0
    """The trainer rank in which the fault happens."""
    seconds: float = 0.0
    """The length of a delay, or of a jump of the clock."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a run."""

    seed: int
    """Seed from which the schedule was drawn."""
    faults: list[Fault]


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a fault, written just before it happens."""

    name: str
    time: float
    """Unix time in seconds, without the jump of an earlier CLOCK_JUMP."""
    pid: int
    step: int


class Injector:
    """Injects the faults of one process.

    >>> injector = Injector(Path("faults.json"), rank=0)
    >>> injector.reach("commit.before", step=6)
    """

    def __init__(self, schedule: Path, *, rank: int = 0, sleep: Callable[[float], None] = time.sleep) -> None:
        """Read the schedule, as `read_schedule` does."""
        self._happened_directory = happened_directory(schedule)
        self._sleep = sleep
        self._by_point: dict[str, list[Fault]] = {}
        for fault in read_schedule(schedule).faults:
            if fault.rank == rank:
                self._by_point.setdefault(fault.point, []).append(fault)

    def reach(self, point: str, *, step: int, path: Path | None = None) -> int:
        """Do what the module's function `reach` describes."""
        num_deliveries = 1
        for fault in self._by_point.get(point, ()):
            if step < fault.step or not self._claim(fault, step):
                continue
            match fault.action:
                case FaultAction.KILL | FaultAction.STOP:
                    os.kill(os.getpid(), signal.SIGKILL if fault.action is FaultAction.KILL else signal.SIGSTOP)
                case FaultAction.DELAY:
                    self._sleep(fault.seconds)
                case FaultAction.NO_SPACE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path or ""))
                case FaultAction.TRUNCATE | FaultAction.FLIP:
                    assert path is not None, f"no directory was just written at {fault.point}"
                    files = (file for file in path.rglob("*") if file.is_file())
                    largest = max(files, key=lambda file: file.stat().st_size)
                    damage(largest, is_truncated=fault.action is FaultAction.TRUNCATE)
                case FaultAction.LOSE:
                    num_deliveries = 0
                case FaultAction.DUPLICATE:
                    num_deliveries += 1
                case FaultAction.CLOCK_JUMP:
                    _shift_wall_clock(fault.seconds)
        return num_deliveries

    def _claim(self, fault: Fault, step: int) -> bool:
        """Return whether the fault happens in this process: it does in the first process that creates the fault's file."""
        self._happened_directory.mkdir(parents=True, exist_ok=True)
        record = Happened(name=fault.name, time=_real_time(), pid=os.getpid(), step=step)
        try:
            fd = os.open(self._happened_directory / f"{fault.name}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(fd)
        return True


_injector: Injector | None = None


def arm(schedule: Path | None, *, rank: int = 0) -> None:
    """Read the schedule of this process. With None, `reach` does nothing. Each role calls this once at its start."""
    global _injector
    _injector = Injector(schedule, rank=rank) if schedule is not None else None


def reach(point: str, *, step: int, path: Path | None = None) -> int:
    """Inject the faults that are due at `point`.

    Args:
        point: the name of the place in the program, one of `POINTS`.
        step: the current step, or the policy version.
        path: the file or directory that was just written, if any.

    Returns:
        How often the caller delivers its message: 1, unless the message is to be lost (0) or duplicated (2).
    """
    return 1 if _injector is None else _injector.reach(point, step=step, path=path)


def happened_directory(schedule: Path) -> Path:
    """Return the directory that holds a file for each fault of `schedule` that has happened."""
    return schedule.with_name(f"{schedule.name}.happened")


def read_schedule(path: Path) -> Schedule:
    """Read a schedule. Raises a ConfigError if it cannot be read or names a point that does not exist."""
    try:
        schedule = msgspec.json.decode(path.read_bytes(), type=Schedule)
    except (OSError, *DECODE_ERRORS) as exc:
        raise ConfigError(f"faults.schedule = {str(path)!r} cannot be read: {exc}") from exc
    for fault in schedule.faults:
        if fault.point not in POINTS:
            points = ", ".join(sorted(POINTS))
            raise ConfigError(
                f"faults.schedule = {str(path)!r}: fault {fault.name!r} is at {fault.point!r}; the points are {points}"
            )
    return schedule


def damage(file: Path, *, is_truncated: bool) -> None:
    """Cut `file` in half, or change one bit in the middle of it."""
    middle = file.stat().st_size // 2
    with file.open("r+b") as opened:
        if is_truncated:
            opened.truncate(middle)
            return
        opened.seek(middle)
        byte = opened.read(1)[0]
        opened.seek(middle)
        opened.write(bytes([byte ^ 1]))


def _shift_wall_clock(seconds: float) -> None:
    """Shift the wall clock of this process by `seconds`, for all code in it that reads the clock through the module `time`."""
    time.time = lambda: _real_time() + seconds
    time.time_ns = lambda: _real_time_ns() + int(seconds * 1e9)
