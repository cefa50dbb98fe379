"""A run on a Ray cluster that terrible things happen to: draws faults, brings them about, and starts again what ends.

Machine 0 has the head of the cluster and the driver of the run, the others its nodes. Each of them sees the output directory
through a file system of its own, whose delay can be set. A stand-in for a scheduler starts again what has ended: Ray on a machine,
the driver, or the whole cluster when its head has ended.
"""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from support.chaos import fill
from support.cluster_run import ENVIRON, MODULES, ClusterRun
from support.processes import wait_until
from trivet.checkpoints.commit import committed_steps
from trivet.cluster.messages import LEAVING_FILE
from trivet.config.layout import COMMITTED
from trivet.errors import NodesMissing
from trivet.history.check import check_run
from trivet.history.run_history import RunHistory
from trivet.telemetry.events import decode_event
from trivet.wire.events import ServerUp, Train

SLOW_DIRECTORY = Path(__file__).with_name("slow_directory_program.py")
_WRONG_CLOCK = Path(__file__).with_name("wrong_clock.c")
_CLOCK_OFFSET_S = 3600
"""Seconds: a machine in the wrong time zone."""
_PATIENCE = {"RAY_health_check_period_ms": "2000", "RAY_health_check_failure_threshold": "6"}
"""What `cluster.ray_node` sets for a run with `lost_after_s = 10`: Ray gives a silent machine up soon after the run has."""
_RECOVERY_S = 420.0
"""A node that serves takes a minute or two to start beside others on few cores, and a lost one is noticed after ten seconds."""
_END_S = 120.0
_FAULT_S = 20.0
_HANG_S = 15.0
"""Delay of every call of a directory that hangs. It is longer than a node may be silent (`lost_after_s`)."""
_STEP = "step"
_STEPS_BETWEEN = 2
_MAY_STAY = ("sleep infinity", str(SLOW_DIRECTORY), "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Words in the commands of a machine itself, and of the agents of Ray, which end a minute after Ray."""
_ENDS = (NodesMissing.exit_code, 128 + signal.SIGTERM, -signal.SIGKILL)
"""The exit codes after which a scheduler starts the driver again."""


def can_mount() -> bool:
    """Return whether `slow_directory_program` can run here."""
    return importlib.util.find_spec("mfusepy") is not None and find_library("fuse3") is not None


@dataclass(slots=True, kw_only=True)
class Endured:
    """One fault, and what the run needed to train steps again."""

    kind: str
    machine: int
    seconds: float
    starts: int
    """Times that the driver was started again for it."""


@dataclass(slots=True, kw_only=True)
class NodeChaos:
    """
    >>> endured, report = NodeChaos(run=run, directory=tmp_path, seed=7).carry_out(draw_node_faults(7, num_faults=8))
    """

    run: ClusterRun
    directory: Path
    seed: int
    num_env_machines: int = 0
    """The last machines are for environments and nothing else."""
    _driver: "subprocess.Popen[bytes]" = field(init=False)
    _clocks: dict[int, Mapping[str, str]] = field(default_factory=dict)
    """Variables of machines whose clock is wrong."""
    _starts: int = 0
    _last_flags: Sequence[str] = ()
    _num_read: int = 0
    """Bytes of the events that were read."""
    _seen: Counter[str] = field(default_factory=Counter)
    """Events so far: of steps under `_STEP`, of servers that were admitted under their host."""

    def carry_out(self, schedule: Sequence[str], *, say: Callable[[str], object] = print) -> tuple[list[Endured], RunHistory]:
        """Bring about every fault of a schedule, let the run finish, and prove its history."""
        rng = random.Random(self.seed)
        self.run.layout.root.mkdir(exist_ok=True)
        for machine in range(self.run.nodes.count):
            self._mount(machine)
        endured: list[Endured] = []
        for kind in schedule:
            self._await_more(_STEP, _STEPS_BETWEEN)
            where, bring_about = FAULTS[kind]
            self._await(lambda where=where: self._machines_at(where), f"a machine for: {kind}")
            machine = rng.choice(self._machines_at(where))
            at, starts = time.monotonic(), self._starts
            bring_about(self, machine)
            self._await_more(_STEP, _STEPS_BETWEEN)
            endured.append(Endured(kind=kind, machine=machine, seconds=time.monotonic() - at, starts=self._starts - starts))
            say(f"{len(endured)}/{len(schedule)} {kind}, machine {machine}: {endured[-1].seconds:.0f} s")
        last_step = self._finish()
        report = check_run(self.run.layout)
        assert not report.ledger.breaches, report.ledger.breaches[:5]
        assert report.last_step == last_step
        return endured, report

    def _machines_at(self, where: str) -> list[int]:
        """Return the machines that a fault may happen to: that of the driver, all with a role, or all with this role."""
        if where == DRIVER:
            return [0]
        roles = MODULES if where == ANY else (where,)
        return sorted({machine for role in roles for machine in self.run.machines_of(role)})

    # The faults.

    def lose(self, machine: int) -> None:
        self.run.nodes.lose(machine)
        time.sleep(3)
        self.run.nodes.connect(machine)
        self.run.nodes.boot(machine)
        self._mount(machine)

    def ask_to_end(self, machine: int) -> None:
        """Take a machine away some seconds after the notice."""
        self._temporary(machine, "leaving").touch()
        time.sleep(10)
        self.lose(machine)

    def cut(self, machine: int, *, seconds: float) -> None:
        self.run.nodes.disconnect(machine)
        time.sleep(seconds)
        self.run.nodes.connect(machine)

    def endure(self, fault: AbstractContextManager[None]) -> None:
        with fault:
            time.sleep(_FAULT_S)

    def delay_directory(self, machine: int, *, seconds: float) -> None:
        self._seconds_file(machine).write_text(str(seconds))
        time.sleep(_FAULT_S)
        self._seconds_file(machine).unlink()

    def hang_directory_of_driver(self) -> None:
        self.delay_directory(0, seconds=_HANG_S)
        self._await_end_of_driver(NodesMissing.exit_code)

    def fill_disk(self, machine: int) -> None:
        fill(self._temporary(machine))
        time.sleep(10)
        self._temporary(machine, "ballast").unlink()

    def set_clock(self, machine: int) -> None:
        """Start a machine again with a clock that is an hour ahead, and wait until it works with that clock."""
        library = self.directory / "wrong_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, _WRONG_CLOCK], check=True)
        self._clocks[machine] = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_S": str(_CLOCK_OFFSET_S)}
        self.lose(machine)
        if machine:
            self._await_more(self.run.nodes.address(machine), 1)
        self._await_more(_STEP, _STEPS_BETWEEN)
        del self._clocks[machine]

    def kill_gcs(self) -> None:
        self.run.nodes.kill_gcs()
        self._await_end_of_driver(NodesMissing.exit_code)

    def kill_driver(self) -> None:
        os.killpg(self._driver.pid, signal.SIGKILL)
        self._await_end_of_driver(-signal.SIGKILL)

    def end_during_commit(self) -> None:
        """Ask the driver to end while a checkpoint is written, as at a time limit."""
        staged = self.run.layout.checkpoints
        self._await(lambda: any(not (path / COMMITTED).exists() for path in staged.glob(".step_*")), "a commit")
        self._end_driver()

    def start_second_driver(self, machine: int) -> None:
        second = self.run.start(*self._resume(), machine=machine, environ=self._environ(machine))
        assert second.wait(_END_S) == 2, self.run.output()
        assert "is in use by the run with pid" in self.run.output()

    # The scheduler.

    def _temporary(self, machine: int, name: str = "") -> Path:
        """Return a temporary file of a machine, as this process sees it."""
        return self.run.nodes.root(machine) / str(self.run.nodes.temporary / name).lstrip("/")

    def _seconds_file(self, machine: int) -> Path:
        return self.directory / f"seconds_{machine}"

    def _environ(self, machine: int) -> dict[str, str]:
        return {**ENVIRON, **_PATIENCE, "TMPDIR": str(self.run.nodes.temporary), **self._clocks.get(machine, {})}

    def _mount(self, machine: int) -> None:
        """Have a machine see the output directory through a slow file system."""
        if not can_mount():
            return
        root = str(self.run.layout.root)
        command = [sys.executable, str(SLOW_DIRECTORY), root, str(self._seconds_file(machine))]
        self.run.nodes.start(machine, command, log=self.directory / "slow_directory.out", environ=os.environ)
        mounts = self.run.nodes.root(machine).with_name("mountinfo")
        wait_until(lambda: f" {root} " in mounts.read_text(), timeout_s=_END_S, waiting_for="the slow directory")

    def _join(self, machine: int) -> None:
        resources = {"sandbox": 1.0} if machine >= self.run.nodes.count - self.num_env_machines else {}
        environ = {**self._environ(machine), LEAVING_FILE: str(self.run.nodes.temporary / "leaving")}
        self.run.nodes.join(machine, resources=resources, environ=environ, does_wait=False)

    def _start_driver(self) -> None:
        assert not self._starts or self._driver.returncode in _ENDS, self.run.everything()
        self._starts += 1
        self._driver = self.run.start(*self._resume(), *self._last_flags, environ=self._environ(0))

    def _resume(self) -> tuple[str, ...]:
        if committed_steps(self.run.layout):
            return ("--ckpt.resume-step", "-1")
        return ("--clean",) if self._starts > 1 else ()

    def _tend(self) -> None:
        """Start again what has ended, as a scheduler does."""
        nodes = self.run.nodes
        if not nodes.has_ray(0):
            self._await(
                lambda: not any(map(self._has_rest, range(self.run.nodes.count))), "the end of all else", does_tend=False
            )
            nodes.start_head(environ=self._environ(0), does_wait=False)
        elif nodes.is_ray_up(0):
            for machine in range(1, self.run.nodes.count):
                if not nodes.has_ray(machine):
                    self._join(machine)
            if (not self._starts or self._driver.poll() is not None) and all(map(nodes.is_ray_up, range(self.run.nodes.count))):
                self._start_driver()

    def _has_rest(self, machine: int) -> bool:
        """Return whether something of Ray or of the run is left on a machine."""
        for pid in self.run.nodes.pids(machine):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                process = psutil.Process(pid)
                command = "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
                if command and not any(word in command for word in _MAY_STAY):
                    return True
        return False

    def _await_more(self, what: str, count: int) -> None:
        """Wait for further events."""
        self._read_events()
        goal = self._seen[what] + count
        self._await(lambda: self._seen[what] >= goal, f"{count} of {what}")

    def _await_end_of_driver(self, code: int) -> None:
        self._await(lambda: self._driver.poll() is not None, "the end of the driver", does_tend=False)
        assert self._driver.returncode == code, self.run.everything()

    def _await(self, condition: Callable[[], object], what: str, *, does_tend: bool = True) -> None:
        deadline = time.monotonic() + _RECOVERY_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {_RECOVERY_S:g} s for {what}: {self.run.everything()}"
            if does_tend:
                self._tend()
            time.sleep(0.2)
            self._read_events()

    def _read_events(self) -> None:
        events = self.run.layout.events
        if not events.exists() or events.stat().st_size < self._num_read:  # the run is begun anew
            self._num_read = 0
            return
        with events.open("rb") as file:
            file.seek(self._num_read)
            lines = [line for line in file if line.endswith(b"\n")]
        self._num_read += sum(map(len, lines))
        for event in map(decode_event, lines):
            if isinstance(event, Train):
                self._seen[_STEP] += 1
            elif isinstance(event, ServerUp):
                self._seen[urlsplit(event.server).hostname or ""] += 1

    def _end_driver(self) -> None:
        (command,) = psutil.Process(self._driver.pid).children()  # its parent only entered the machine
        command.send_signal(signal.SIGTERM)
        self._await_end_of_driver(128 + signal.SIGTERM)

    def _finish(self) -> int:
        """Have the run commit, start it a last time with a goal that is near, and return that step."""
        self._end_driver()
        goal = committed_steps(self.run.layout)[-1] + 5
        self._last_flags = ("--max-steps", str(goal))
        self._start_driver()
        self._await_end_of_driver(0)
        wait_until(lambda: not self._machines_at(ANY), timeout_s=_END_S, waiting_for="the end of every role")
        return goal


DRIVER, ANY = "driver", "any"
"""The machine of the driver, and any that runs a role. Other faults happen to a machine that runs the role that they name."""


FAULTS: dict[str, tuple[str, Callable[[NodeChaos, int], None]]] = {
    "machine that serves lost": ("inference", NodeChaos.lose),
    "machine that trains lost": ("trainer", NodeChaos.lose),
    "machine of the first rank lost": ("orchestrator", NodeChaos.lose),
    "machine with environments lost": ("env-workers", NodeChaos.lose),
    "driver's machine lost": (DRIVER, NodeChaos.lose),
    "one machine asked to end": (ANY, NodeChaos.ask_to_end),
    "link cut for 5 s": (ANY, lambda chaos, machine: chaos.cut(machine, seconds=5)),
    "link cut for 60 s": (ANY, lambda chaos, machine: chaos.cut(machine, seconds=60)),
    "link cut towards the driver": (ANY, lambda chaos, machine: chaos.endure(chaos.run.nodes.silenced(machine, towards=0))),
    "link cut from the driver": (ANY, lambda chaos, machine: chaos.endure(chaos.run.nodes.silenced(0, towards=machine))),
    "10 % of the frames lost": (ANY, lambda chaos, machine: chaos.endure(chaos.run.nodes.worse(machine, loss=0.1))),
    "200 ms of delay each way": (ANY, lambda chaos, machine: chaos.endure(chaos.run.nodes.worse(machine, delay_s=0.2))),
    "directory slow": (ANY, lambda chaos, machine: chaos.delay_directory(machine, seconds=0.1)),
    "directory hangs": (ANY, lambda chaos, machine: chaos.delay_directory(machine, seconds=_HANG_S)),
    "driver's directory hangs": (DRIVER, lambda chaos, _: chaos.hang_directory_of_driver()),
    "disk of one machine full": (ANY, NodeChaos.fill_disk),
    "clock an hour off": ("inference", NodeChaos.set_clock),
    "driver's clock an hour off": (DRIVER, NodeChaos.set_clock),
    "actor killed": (ANY, lambda chaos, machine: chaos.run.nodes.kill_actor(machine)),
    "raylet killed": (ANY, lambda chaos, machine: chaos.run.nodes.kill_raylet(machine)),
    "GCS killed": (DRIVER, lambda chaos, _: chaos.kill_gcs()),
    "driver killed": (DRIVER, lambda chaos, _: chaos.kill_driver()),
    "driver asked to end during a commit": (DRIVER, lambda chaos, _: chaos.end_during_commit()),
    "second driver": (ANY, NodeChaos.start_second_driver),
}


def draw_node_faults(seed: int, *, num_faults: int, among: Sequence[str] = tuple(FAULTS)) -> list[str]:
    """Draw kinds of faults. Each of `among` comes before any comes again."""
    rng = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < num_faults:
        drawn += rng.sample(among, len(among))
    return drawn[:num_faults]
