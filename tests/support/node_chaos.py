"""A run over nodes that terrible things happen to: draws a schedule of faults, brings them about, and starts again what ends.

Node 0 leads and trains, the others that train and those that serve follow. Every node sees the output directory through a file
system of its own, whose delay can be set. Whatever ends is started again: an agent while the first node lives, every node when that
has ended.
"""

import importlib.util
import os
import random
import shutil
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
from support.cluster_run import ENVIRON
from support.node_run import NodeRun
from support.processes import wait_until
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import COMMITTED
from trivet.history.check import check_run
from trivet.history.run_history import RunHistory
from trivet.telemetry.events import decode_event
from trivet.wire.events import ServerUp, Train

SLOW_DIRECTORY = Path(__file__).with_name("slow_directory_program.py")
WRONG_CLOCK = Path(__file__).with_name("wrong_clock.c")
CLOCK_OFFSET_S = 3600
"""Seconds: a machine in the wrong time zone."""
_PRIVATE_TMP = 'mount -t tmpfs -o size=128m tmpfs "$TMPDIR"'
_IS_MOUNTED = 'grep -q " $OUTPUT_DIR .* - fuse " /proc/self/mountinfo'
AWAIT_MOUNT = f"for _ in $(seq 600); do {_IS_MOUNTED} && break; sleep 0.1; done; {_IS_MOUNTED}"
"""Shell words that wait a minute for `slow_directory_program`, and fail under `sh -e` if it mounted nothing."""
_SLOW_OUTPUT = f'( "$PYTHON" "$SLOW_DIRECTORY" "$OUTPUT_DIR" "$SECONDS_FILE" & ); {AWAIT_MOUNT}'
_POLL_S = 0.2
_RECOVERY_S = 420.0
"""A node that serves takes a minute or two to start beside others on few cores, and a lost one is noticed after ten seconds."""
_END_S = 120.0
_STEPS_BETWEEN = 2
_CALM_STEPS = 5


def can_set_clock() -> bool:
    """Return whether `wrong_clock.c` can be compiled here."""
    return shutil.which("cc") is not None


def can_mount() -> bool:
    """Return whether `slow_directory_program` can run here."""
    return importlib.util.find_spec("mfusepy") is not None and find_library("fuse3") is not None


@dataclass(slots=True, kw_only=True)
class Endured:
    """One fault, and what the run needed to train steps again."""

    kind: str
    node: int
    seconds: float
    starts: int
    """Times that every node was started again for it."""


@dataclass(slots=True, kw_only=True)
class NodeOutcome:
    endured: list[Endured]
    report: RunHistory
    seconds: float

    @property
    def kinds(self) -> Counter[str]:
        return Counter(item.kind for item in self.endured)


@dataclass(slots=True, kw_only=True)
class NodeChaos:
    """
    >>> schedule = draw_node_faults(7, num_faults=8, num_train_nodes=2, num_nodes=run.count)
    >>> outcome = NodeChaos(run=run, directory=tmp_path, num_train_nodes=2).carry_out(schedule)
    """

    run: NodeRun
    directory: Path
    num_train_nodes: int
    _processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _environ: dict[int, Mapping[str, str]] = field(default_factory=dict)
    """Variables of nodes that differ from the others."""
    _has_slow_directories: bool = False
    _starts: int = 0
    _flags: Sequence[str] = ()
    """Those of the newest start: all nodes of a run are started by one command."""
    _read: int = 0
    _num_steps: int = 0
    """Train events so far."""
    _admissions: Counter[str] = field(default_factory=Counter)
    """ServerUp events so far, by the host of the server."""

    def carry_out(self, schedule: Sequence[tuple[str, int]], *, say: Callable[[str], object] = print) -> NodeOutcome:
        """Bring about every fault of a schedule, let the run finish, and prove its history."""
        started = time.monotonic()
        self._has_slow_directories = any("directory" in kind for kind, _ in schedule)
        self._start_every_node()
        endured: list[Endured] = []
        for kind, node in schedule:
            self._await_steps(_STEPS_BETWEEN)
            at, starts = time.monotonic(), self._starts
            FAULTS[kind](self, node)
            self._await_steps(_STEPS_BETWEEN)
            endured.append(Endured(kind=kind, node=node, seconds=time.monotonic() - at, starts=self._starts - starts))
            say(f"{len(endured)}/{len(schedule)} {kind}, node {node}: {endured[-1].seconds:.0f} s")
        self._finish()
        report = check_run(self.run.layout)
        assert not report.ledger.breaches, report.ledger.breaches[:5]
        assert not self.run.layout.control.exists()
        assert not self.run.layout.lease.exists()
        return NodeOutcome(endured=endured, report=report, seconds=time.monotonic() - started)

    # The faults.

    def lose(self, node: int) -> None:
        self.run.nodes.lose(node)
        time.sleep(3)
        self.run.nodes.connect(node)

    def cut_shortly(self, node: int) -> None:
        self._cut(node, seconds=5)

    def cut_long(self, node: int) -> None:
        self._cut(node, seconds=60)

    def _cut(self, node: int, *, seconds: float) -> None:
        self.run.nodes.disconnect(node)
        time.sleep(seconds)
        self.run.nodes.connect(node)

    def silence(self, node: int) -> None:
        self._during(self.run.nodes.silenced(node, towards=0))

    def deafen(self, node: int) -> None:
        self._during(self.run.nodes.silenced(0, towards=node))

    def lose_frames(self, node: int) -> None:
        self._during(self.run.nodes.worse(node, loss=0.1))

    def delay_frames(self, node: int) -> None:
        self._during(self.run.nodes.worse(node, delay_s=0.2))

    def _during(self, fault: AbstractContextManager[None], *, seconds: float = 20.0) -> None:
        with fault:
            time.sleep(seconds)

    def slow_directory(self, node: int) -> None:
        self._delay_directory(node, seconds=0.1)

    def hang_directory(self, node: int) -> None:
        """Delay every call by 15 s, which is longer than a node may be silent (`lost_after_s`)."""
        self._delay_directory(node, seconds=15)
        if node == 0:
            self._await_end_of_head()
            assert self._processes[0].returncode == 75, self.run.everything()

    def _delay_directory(self, node: int, *, seconds: float) -> None:
        delay = self._seconds_file(node)
        delay.write_text(str(seconds))
        time.sleep(20)
        delay.unlink()

    def fill_disk(self, node: int) -> None:
        pid = next(pid for pid in self.run.nodes.pids(node) if not _is_file_system(pid))
        disk = Path(f"/proc/{pid}/root{self._temporary(node)}")
        fill(disk)
        time.sleep(10)
        with suppress(FileNotFoundError):  # the process that the disk was seen through has ended, and the disk with it
            (disk / "ballast").unlink()

    def set_clock(self, node: int) -> None:
        """Start the node again with a clock that is an hour ahead, and wait until it works with that clock."""
        library = self.directory / "wrong_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, WRONG_CLOCK], check=True)
        self._environ[node] = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_S": str(CLOCK_OFFSET_S)}
        self.run.nodes.kill(node)
        if node == 0:
            self._await_end_of_head()
        if node >= self.num_train_nodes:
            self._await_admission(node)
        self._await_steps(_STEPS_BETWEEN)
        del self._environ[node]

    def kill_agent(self, node: int) -> None:
        self._processes[node].kill()

        self._processes[node].wait(_END_S)

    def end_during_commit(self, _: int) -> None:
        """Have the scheduler ask for the end while a checkpoint is written, as at a time limit."""
        checkpoints = self.run.layout.checkpoints
        self._await(lambda: any(not (path / COMMITTED).exists() for path in checkpoints.glob(".step_*")), "a commit")
        self._processes[0].send_signal(signal.SIGTERM)
        self._await_end_of_head()
        assert self._processes[0].returncode == 128 + signal.SIGTERM, self.run.everything()

    def end_node(self, node: int) -> None:
        self._processes[node].send_signal(signal.SIGTERM)
        if node < self.num_train_nodes:
            self._await_end_of_head()
            assert self._processes[0].returncode == 75, self.run.everything()
        else:
            time.sleep(1.5)  # a signal that comes sooner is still the first
            self._processes[node].send_signal(signal.SIGTERM)
            assert self._processes[node].wait(_END_S) == 128 + signal.SIGTERM, self.run.everything()

    def start_second_head(self, node: int) -> None:
        """Start the command of the first node on another machine too."""
        second = self._start(0, at=node, flags=self._resume())
        assert second.wait(_END_S) == 2, self.run.output()
        assert "is in use by the run with pid" in self.run.output() or "leads the run" in self.run.output()

    # The scheduler.

    def _start(self, node: int, *, flags: Sequence[str], at: int | None = None) -> "subprocess.Popen[bytes]":
        place = node if at is None else at
        temporary = self._temporary(place)
        temporary.mkdir(exist_ok=True)
        steps = [_PRIVATE_TMP, *([_SLOW_OUTPUT] if self._has_slow_directories else []), 'exec "$@"']
        environ = {
            **ENVIRON,
            "TMPDIR": str(temporary),
            "PYTHON": sys.executable,
            "SLOW_DIRECTORY": str(SLOW_DIRECTORY),
            "OUTPUT_DIR": str(self.run.layout.root),
            "SECONDS_FILE": str(self._seconds_file(place)),
        }
        self.run.layout.root.mkdir(exist_ok=True)
        through = ["sh", "-ec", "\n".join(steps), "sh"]
        if extra := self._environ.get(node):
            through += ["env", *(f"{name}={value}" for name, value in extra.items())]
        return self.run.start(node, *flags, at=at, environ=environ, through=through)

    def _temporary(self, node: int) -> Path:
        return self.directory / f"tmp_{node}"

    def _seconds_file(self, node: int) -> Path:
        return self.directory / f"seconds_{node}"

    def _resume(self) -> tuple[str, ...]:
        if committed_steps(self.run.layout):
            return ("--ckpt.resume-step", "-1")
        return ("--clean",) if self._starts > 1 else ()

    def _start_every_node(self, *flags: str) -> None:
        self._starts += 1
        self._flags = (*self._resume(), *flags)
        for node in reversed(range(self.run.count)):
            self._processes[node] = self._start(node, flags=self._flags)

    def _tend(self) -> None:
        """Start again what has ended, as a scheduler does."""
        head = self._processes[0]
        if head.poll() is not None:
            self._await_end_of_all()
            self._start_every_node()
            return
        for node, process in self._processes.items():
            if node and process.poll():  # 0: the run is over
                with suppress(AssertionError):
                    self.run.nodes.kill(node)
                self._processes[node] = self._start(node, flags=self._flags)

    def _await_end_of_all(self) -> None:
        """Wait until the other nodes have ended by themselves: they miss the first one."""
        deadline = time.monotonic() + _END_S
        while self._remaining():
            assert time.monotonic() < deadline, f"something is left: {self.run.everything()}"
            for process in self._processes.values():
                process.poll()
            time.sleep(_POLL_S)

    def _remaining(self) -> list[int]:
        """Return the processes of the run on all nodes; end the file systems of nodes whose command has ended."""
        remaining: list[int] = []
        for node in range(self.run.count):
            pids = self.run.nodes.pids(node)
            of_directory = [pid for pid in pids if _is_file_system(pid)]
            if len(of_directory) == len(pids):
                for pid in of_directory:
                    os.kill(pid, signal.SIGKILL)
            remaining += [pid for pid in pids if pid not in of_directory]
        return remaining

    def _await_steps(self, count: int) -> None:
        self._read_events()
        goal = self._num_steps + count
        self._await(lambda: self._num_steps >= goal, f"{count} steps")

    def _await_admission(self, node: int) -> None:
        """Wait until a server of `node` is given rollouts once more."""
        self._read_events()
        host = self.run.nodes.address(node)
        before = self._admissions[host]
        self._await(lambda: self._admissions[host] > before, f"rollouts for node {node}")

    def _await_end_of_head(self) -> None:
        self._await(lambda: self._processes[0].poll() is not None, "the end of the run", does_tend=False)

    def _await(self, condition: Callable[[], object], what: str, *, does_tend: bool = True) -> None:
        deadline = time.monotonic() + _RECOVERY_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {_RECOVERY_S:g} s for {what}: {self.run.everything()}"
            if does_tend:
                self._tend()
            time.sleep(_POLL_S)
            self._read_events()

    def _read_events(self) -> None:
        events = self.run.layout.events
        size = events.stat().st_size if events.exists() else 0
        if size < self._read:  # the run was begun anew
            self._read = 0
        if size > self._read:
            with events.open("rb") as file:
                file.seek(self._read)
                for line in file.readlines():
                    if line.endswith(b"\n"):
                        self._read += len(line)
                        event = decode_event(line)
                        self._num_steps += isinstance(event, Train)
                        if isinstance(event, ServerUp):
                            self._admissions[urlsplit(event.server).hostname or ""] += 1

    def _finish(self) -> None:
        """Have the run commit, and start it a last time with a goal that is near."""
        self._processes[0].send_signal(signal.SIGTERM)
        self._await_end_of_head()
        self._await_end_of_all()
        goal = committed_steps(self.run.layout)[-1] + _CALM_STEPS
        self._start_every_node("--max-steps", str(goal))
        codes = [self._processes[node].wait(_RECOVERY_S) for node in range(self.run.count)]
        assert codes == [0] * self.run.count, self.run.everything()
        wait_until(lambda: not self._remaining(), timeout_s=_END_S, waiting_for="the end of every process")


def _is_file_system(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return str(SLOW_DIRECTORY) in psutil.Process(pid).cmdline()
    return False


FAULTS: dict[str, Callable[[NodeChaos, int], None]] = {
    "node that serves lost": NodeChaos.lose,
    "node that trains lost": NodeChaos.lose,
    "first node lost": NodeChaos.lose,
    "link cut for 5 s": NodeChaos.cut_shortly,
    "link cut for 60 s": NodeChaos.cut_long,
    "link cut towards the first node": NodeChaos.silence,
    "link cut from the first node": NodeChaos.deafen,
    "10 % of the frames lost": NodeChaos.lose_frames,
    "200 ms of delay each way": NodeChaos.delay_frames,
    "directory slow": NodeChaos.slow_directory,
    "directory hangs": NodeChaos.hang_directory,
    "first node's directory hangs": NodeChaos.hang_directory,
    "disk of one node full": NodeChaos.fill_disk,
    "clock an hour off": NodeChaos.set_clock,
    "first node's clock an hour off": NodeChaos.set_clock,
    "agent killed": NodeChaos.kill_agent,
    "first node's launcher killed": NodeChaos.kill_agent,
    "first node asked to end during a commit": NodeChaos.end_during_commit,
    "one node asked to end": NodeChaos.end_node,
    "second first node": NodeChaos.start_second_head,
}
_FAULTS_OF_ANY_NODE = ("directory slow", "disk of one node full")
"""Faults that may happen to the first node too, without a name of their own."""


def draw_node_faults(
    seed: int, *, num_faults: int, num_train_nodes: int, num_nodes: int, among: Sequence[str] = tuple(FAULTS)
) -> list[tuple[str, int]]:
    """Draw kinds of faults and the nodes that they happen to. Each of `among` comes before any comes again."""
    rng = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < num_faults:
        drawn += rng.sample(among, len(among))
    return [(kind, _draw_node(rng, kind, num_train_nodes=num_train_nodes, num_nodes=num_nodes)) for kind in drawn[:num_faults]]


def _draw_node(rng: random.Random, kind: str, *, num_train_nodes: int, num_nodes: int) -> int:
    if kind.startswith("first node"):
        return 0
    if kind in _FAULTS_OF_ANY_NODE:
        return rng.randrange(num_nodes)
    if "serves" in kind:
        return rng.randrange(num_train_nodes, num_nodes)
    if "trains" in kind:
        return rng.randrange(1, num_train_nodes) if num_train_nodes > 1 else num_train_nodes
    return rng.randrange(1, num_nodes)
