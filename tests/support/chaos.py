"""A run of `rl` that terrible things happen to: draws a schedule of faults, brings them about, and watches the run survive.

Most faults happen inside the roles (trivet.faults). A fault that stops a process may name a victim: another process, which is
killed at that very moment, before the stopped one goes on. When the launcher dies or gives up, the run is resumed.
"""

import errno
import random
import signal
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil

from support.processes import assert_all_gone, assert_port_free, descendants_of, descendants_with
from support.rl_run import Run
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.faults import POINTS, Fault, FaultAction, Happened, Schedule, happened_directory
from trivet.history.check import check_run
from trivet.history.run_history import RunHistory
from trivet.launcher.run_directory import RunDirectory
from trivet.telemetry.events import decode_event
from trivet.wire.events import AnyEvent, Load, Train

FIRST_STEP = 3
"""First step with a fault. Earlier there are no checkpoints to resume from."""
_CALM_STEPS = 3
"""Number of steps after the last fault."""
_POLL_S = 0.05
_FAMILY_S = 1.0
_MAX_LAUNCHES = 30
_BALLAST = "ballast"
MODULES = {
    "inference": "trivet.inference.main",
    "orchestrator": "trivet.orchestrator.main",
    "env_worker": "trivet.environments.workers.main",
    "trainer": "trivet.trainer.main",
}
"""A word in the command line of each kind of process."""

DISK = "disk"
FULL_S = 10.0

FLAGS = (
    *("--trainer-cpu-ranks", "2"),
    *("--ckpt.interval", "1"),
    *("--ckpt.keep-last", "2"),
    *("--recovery.restart-window-s", "1"),
    *("--trainer.rollout-transport.timeout-s", "240"),
    *("--trainer.rollout-transport.resend-interval-s", "1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    fault: Fault
    victim: str = ""
    """The process to kill while the process of `fault` is stopped: a key of MODULES, or `launcher`. `disk` is filled
    instead."""

    @property
    def kind(self) -> str:
        if self.victim == DISK:
            return "full disk"
        return f"kill {self.victim}" if self.victim else str(self.fault.action)


def _kills() -> Iterator[Planned]:
    ranks = {
        "optimizer_step.before",
        "optimizer_step.during",
        "optimizer_step.after",
        "trainer_half.before",
        "trainer_half.during",
    }
    for point in sorted(POINTS):
        for rank in (0, 1) if point in ranks else (0,):
            yield Planned(fault=Fault(name="", point=point, action=FaultAction.KILL, rank=rank))


def _others() -> Iterator[Planned]:
    for point in ("optimizer_step.before", "commit.during", "batch_send.before", "reload.during"):
        yield Planned(fault=Fault(name="", point=point, action=FaultAction.STOP, seconds=4.0))
    for point, victim in (
        ("dispatch.after", "env_worker"),
        ("batch_send.before", "env_worker"),
        ("dispatch.after", "inference"),
        ("weight_write.during", "inference"),
        ("optimizer_step.after", "launcher"),
        ("commit.during", "launcher"),
        ("orchestrator_half.during", "launcher"),
        ("reload.during", "launcher"),
    ):
        yield Planned(fault=Fault(name="", point=point, action=FaultAction.STOP), victim=victim)
    for point in ("weight_write.after", "stable.before"):
        for action in (FaultAction.TRUNCATE, FaultAction.FLIP):
            yield Planned(fault=Fault(name="", point=point, action=action))
    for point in ("batch_acknowledge.before", "batch_acknowledge.after"):
        for action in (FaultAction.LOSE, FaultAction.DUPLICATE):
            yield Planned(fault=Fault(name="", point=point, action=action))
        yield Planned(fault=Fault(name="", point=point, action=FaultAction.DELAY, seconds=2.5))
    for point in ("weight_write.during", "trainer_half.before", "orchestrator_half.during"):
        yield Planned(fault=Fault(name="", point=point, action=FaultAction.NO_SPACE))
    for point, seconds in (("optimizer_step.before", 7200.0), ("dispatch.after", -7200.0)):
        yield Planned(fault=Fault(name="", point=point, action=FaultAction.CLOCK_JUMP, seconds=seconds))


ALL_FAULTS = (*_kills(), *_others())
FULL_DISK = tuple(
    Planned(fault=Fault(name="", point=point, action=FaultAction.STOP), victim=DISK)
    for point in ("weight_write.before", "orchestrator_half.before", "trainer_half.before")
)
"""Kinds of faults for a run whose directory is a small file system: it is full for FULL_S, for every process."""


def draw_schedule(seed: int, *, num_faults: int, among: Sequence[Planned] = ALL_FAULTS) -> list[Planned]:
    """Draw `num_faults` faults, one a step from FIRST_STEP on. Each of `among` comes before any comes again."""
    rng = random.Random(seed)
    drawn: list[Planned] = []
    while len(drawn) < num_faults:
        drawn += rng.sample(among, len(among))
    return [
        replace(planned, fault=msgspec.structs.replace(planned.fault, name=f"f{index:03d}", step=FIRST_STEP + index))
        for index, planned in enumerate(drawn[:num_faults])
    ]


def last_step(schedule: Sequence[Planned]) -> int:
    return max(planned.fault.step for planned in schedule) + _CALM_STEPS


@dataclass(slots=True, kw_only=True)
class Survived:
    """One fault that happened, and the run's recovery. Seconds are counted from the fault."""

    planned: Planned
    step: int
    at: float
    next_step_s: float | None = None
    """Seconds to the next step trained."""
    next_load_s: float | None = None
    """Seconds to the next policy that a server serves, with the digest of its publication."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    survived: list[Survived]
    report: RunHistory
    launches: int
    seconds: float

    @property
    def kinds(self) -> Counter[str]:
        return Counter(item.planned.kind for item in self.survived)


@dataclass(slots=True, kw_only=True)
class ChaosRun:
    """
    >>> outcome = ChaosRun(run=run, schedule=draw_schedule(1, num_faults=8), seed=1, directory=tmp_path).carry_out()
    """

    run: Run
    schedule: Sequence[Planned]
    seed: int
    directory: Path
    timeout_s: float
    """Seconds for everything, resumes included."""
    flags: Sequence[str] = ()
    disk: Path | None = None
    """Mount point of the small file system that holds the run, for faults that fill it."""
    survived: list[Survived] = field(default_factory=list)
    launches: int = 0
    _family: set[psutil.Process] = field(default_factory=set)
    _family_at: float = 0.0
    _to_continue: list[tuple[float, int]] = field(default_factory=list)
    """Time of the kill, and the process that is stopped meanwhile."""
    _scratch: set[Path] = field(default_factory=set)
    """Directories of the launchers' temporary files."""
    _room_at: float = float("inf")
    """Time at which the full disk is emptied again."""
    _read: int = 0
    """Number of bytes of events.jsonl that were read."""

    @property
    def layout(self) -> RunLayout:
        return self.run.layout

    @property
    def _schedule_file(self) -> Path:
        return self.directory / "faults.json"

    def carry_out(self) -> Outcome:
        """Run to the last step whatever happens. Check that nothing is left behind and that the history is proven."""
        schedule = Schedule(seed=self.seed, faults=[planned.fault for planned in self.schedule])
        self._schedule_file.write_bytes(msgspec.json.format(msgspec.json.encode(schedule), indent=1))
        started = time.monotonic()
        try:
            while self._launch(deadline=started + self.timeout_s) != 0:
                assert self.launches < _MAX_LAUNCHES, (
                    f"still not done after {self.launches} launches: {self.run.output[-4000:]}"
                )
        finally:
            self._end_everything()
        assert self._scratch
        assert not [path for path in self._scratch if path.exists()], "temporary files were left behind"
        report = check_run(self.layout)
        assert not report.ledger.breaches, report.ledger.breaches[:5]
        return Outcome(survived=self.survived, report=report, launches=self.launches, seconds=time.monotonic() - started)

    def _launch(self, *, deadline: float) -> int:
        """Start or resume the run, and watch it to its end. Return how it ended."""
        self.launches += 1
        resume = ("--ckpt.resume-step", "-1") if committed_steps(self.layout) else ("--clean",) if self.launches > 1 else ()
        process = self.run.start(*FLAGS, "--faults.schedule", str(self._schedule_file), *self.flags, *resume)
        while process.poll() is None:
            assert time.monotonic() < deadline, f"no end after {self.timeout_s:g} s: {self.run.output[-6000:]}"
            self._look(process.pid)
            time.sleep(_POLL_S)
        self._free_the_disk()
        self._read_events()
        self._let_go_on(now=float("inf"))
        assert_all_gone(list(self._family), timeout_s=15.0)
        self._assert_nothing_blocks()
        return process.returncode

    def _look(self, launcher: int) -> None:
        now = time.monotonic()
        if now - self._family_at > _FAMILY_S:
            self._family_at = now
            self._family.update(descendants_of(launcher))
            with suppress(FileNotFoundError):
                self._scratch.add(Path(self.layout.scratch_note.read_text().strip()))
        self._read_events()
        for record in self._new_records():
            self._react(record, launcher)
        self._let_go_on(now=now)
        if now > self._room_at:
            self._free_the_disk()

    def _free_the_disk(self) -> None:
        self._room_at = float("inf")
        if self.disk is not None:
            (self.disk / _BALLAST).unlink(missing_ok=True)

    def _new_records(self) -> Iterator[Happened]:
        known = {item.planned.fault.name for item in self.survived}
        for path in sorted(happened_directory(self._schedule_file).glob("*.json")):
            if path.stem not in known and (content := path.read_bytes()):
                yield msgspec.json.decode(content, type=Happened)

    def _react(self, record: Happened, launcher: int) -> None:
        planned = next(planned for planned in self.schedule if planned.fault.name == record.name)
        self.survived.append(Survived(planned=planned, step=record.step, at=time.monotonic()))
        if planned.fault.action is not FaultAction.STOP:
            return
        self._family.update(descendants_of(launcher))
        if planned.victim == "launcher":
            psutil.Process(launcher).kill()
        elif planned.victim == DISK:
            assert self.disk is not None
            fill(self.disk)
            self._room_at = time.monotonic() + FULL_S
        elif planned.victim:
            for process in descendants_with(MODULES[planned.victim], launcher)[:1]:
                process.kill()
        self._to_continue.append((time.monotonic() + planned.fault.seconds, record.pid))

    def _let_go_on(self, *, now: float) -> None:
        for due, pid in list(self._to_continue):
            if due <= now:
                self._to_continue.remove((due, pid))
                if psutil.pid_exists(pid) and any(process.pid == pid for process in self._family):
                    psutil.Process(pid).send_signal(signal.SIGCONT)

    def _read_events(self) -> None:
        """Record when the run recovered, by our own clock: the roles' clocks may have jumped."""
        if not self.layout.events.exists():
            return
        with self.layout.events.open("rb") as file:
            file.seek(self._read)
            lines = file.readlines()
        now = time.monotonic()
        for line in lines:
            if line.endswith(b"\n"):
                self._read += len(line)
                self._note(decode_event(line), now)

    def _note(self, event: AnyEvent, now: float) -> None:
        for item in self.survived:
            if isinstance(event, Train) and item.next_step_s is None:
                item.next_step_s = now - item.at
            if isinstance(event, Load) and item.next_load_s is None:
                item.next_load_s = now - item.at

    def _assert_nothing_blocks(self) -> None:
        for name, table in (("trainer.toml", "rollout_transport"), ("inference.toml", "server")):
            assert_port_free(_port(self.layout.configs / name, table))
        with RunDirectory(self.layout):
            pass

    def _end_everything(self) -> None:
        """End what is left, which only a failure leaves."""
        with ExitStack() as after:
            for process in self._family:
                after.callback(_end, process)
            if self.run.process is not None and self.run.process.poll() is None:
                self.run.process.kill()


def fill(disk: Path) -> None:
    """Leave no byte free on the file system at `disk`."""
    with (disk / _BALLAST).open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise


def _end(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _port(config: Path, table: str) -> int:
    return int(tomllib.loads(config.read_text())[table]["port"])
