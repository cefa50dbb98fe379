"""Stand-ins for the supervisor's surroundings: a clock that tests move, processes that are only objects, attempts of a run."""

import io
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from trivet.cluster.messages import NodeFacts
from trivet.config.layout import RunLayout
from trivet.config.schema.deployment import RecoveryConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.launcher.logs import RunLog
from trivet.launcher.plan import TRAINING, ProcessSpec, RecoveryUnit, RunPlan, report_files
from trivet.launcher.processes import RoleReports, read_reports
from trivet.wire.events import Event
from trivet.wire.status import ProcessReport
from trivet.wire.versions import Step

NAMES = ("inference", "trainer", "orchestrator")


def make_facts(name: str = "machine-1", *, host: str = "10.0.0.1", ray_node: str = "abc", num_gpus: int = 1) -> NodeFacts:
    """Return the machine of an actor."""
    return NodeFacts(
        name=name,
        host=host,
        interface="eth0",
        gpus=tuple(map(str, range(num_gpus))),
        num_cpus=192,
        version="1",
        has_working_dir=True,
        does_see_lock=True,
        ray_node=ray_node,
        niceness=0,
    )


@dataclass
class FakeClock:
    """Time passes in sleeps. Planned calls happen when their time has come."""

    time: float = 100.0
    planned: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    unix_time = now

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for moment, happens in sorted(self.planned, key=lambda each: each[0]):
            if moment <= self.time:
                self.planned.remove((moment, happens))
                happens()


@dataclass(kw_only=True)
class FakeChild:
    spec: ProcessSpec
    pid: int
    exit_code: int | None = None
    log_offset: int = 0
    does_heed_sigterm: bool = True
    signals: list[signal.Signals] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)

    def signal_group(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self.signals.append(number)
            if number == signal.SIGKILL or self.does_heed_sigterm:
                self.exit_code = -number

    def signal_leader(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def show_stacks(self, pids: Iterable[int]) -> None:
        self.shown.extend(pids)

    def read_reports(self) -> RoleReports:
        return read_reports(self.spec.reports)


@dataclass
class FakeHost:
    """Starts objects instead of processes, and records its calls."""

    clock: FakeClock = field(default_factory=FakeClock)
    started: list[FakeChild] = field(default_factory=list)
    started_at: list[float] = field(default_factory=list)
    spared: list[Collection[FakeChild]] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    """Pids of processes that a signal has stopped."""
    lost: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    was_hurried: bool = False

    def newest(self, name: str) -> FakeChild:
        return next(child for child in reversed(self.started) if child.spec.name == name)

    def start(self, spec: ProcessSpec) -> FakeChild:
        for report in spec.reports:
            report.path.unlink(missing_ok=True)
        child = FakeChild(spec=spec, pid=1000 + len(self.started))
        self.started.append(child)
        self.started_at.append(self.clock.now())
        return child

    def stop(self, children: Sequence[FakeChild], *, timeout_s: float, is_hurried: Callable[[], bool]) -> Sequence[FakeChild]:
        for child in children:
            child.signal_group(signal.SIGTERM)
        self.was_hurried = is_hurried()
        killed = [child for child in children if child.exit_code is None]
        for child in killed:
            child.signal_group(signal.SIGKILL)
        return killed

    def end_orphans(self, *, spared: Collection[FakeChild] = ()) -> None:
        self.spared.append(spared)

    def find_stopped(self, processes: Sequence[FakeChild]) -> list[tuple[int, ...]]:
        return [(process.pid,) if process.pid in self.stopped else () for process in processes]

    def lost_nodes(self) -> frozenset[int]:
        return frozenset(self.lost)

    def leaving_nodes(self) -> frozenset[int]:
        return frozenset(self.leaving)

    def joined_nodes(self) -> frozenset[int]:
        return frozenset()


@dataclass(kw_only=True)
class FakeAttempts:
    layout: RunLayout
    config: RLConfig = field(default_factory=RLConfig)
    run: RunIdentity = field(default_factory=RunIdentity)
    from_step: Step | None = None
    max_steps: int | None = 3
    last_commit: Step | None = None
    complete: set[str] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    error: Exception | None = None
    """If set, raised when the next attempt begins."""
    urls: Sequence[str] = ()

    @property
    def is_last_step_committed(self) -> bool:
        return self.last_commit is not None and self.last_commit >= (self.max_steps or 0)

    names: Sequence[str] = NAMES
    starts_after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    num_plans: int = 0

    @property
    def planned(self) -> RunPlan:
        specs = [make_spec(self.layout, name) for name in self.names]
        return RunPlan(
            processes=tuple(replace(spec, starts_after=self.starts_after.get(spec.name, ())) for spec in specs),
            configs={},
            notices=(),
            server_urls={RecoveryUnit("inference"): tuple(self.urls)},
        )

    named_without: list[set[str]] = field(default_factory=list)
    """The units that each list of servers left out."""

    def plan_again(self, servers: Collection[RecoveryUnit]) -> None:
        self.num_plans += 1

    def name_servers(self, *, without: Collection[RecoveryUnit] = ()) -> None:
        self.named_without.append(set(without))

    def begin_next(self, log: RunLog) -> None:
        if self.error is not None:
            raise self.error
        self.run = self.run.model_copy(update={"attempt": self.run.attempt + 1})
        self.from_step = self.last_commit

    def has_completed(self, role: str) -> bool:
        return role in self.complete

    def record(self, event: Event) -> None:
        self.events.append(event)


def make_config(**recovery: object) -> RLConfig:
    """Return a run's configuration with the given keys of [recovery]."""
    return RLConfig().model_copy(update={"recovery": RecoveryConfig.model_validate(recovery)})


def make_spec(layout: RunLayout, name: str) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        unit=RecoveryUnit(name) if name == "inference" else TRAINING,
        argv=(),
        log=layout.log_file(f"{name}.stdout"),
        env={},
        env_defaults={},
        does_finish=name != "inference",
        records_end=name != "trainer-1",
        reports=report_files(layout, name),
    )


def write_report(
    layout: RunLayout, role: str, *, rank: int = 0, pid: int = 1, attempt: int = 1, time: float = 0.0, **fields: Any
) -> None:
    """Write the report of a process of a role."""
    layout.reports.mkdir(parents=True, exist_ok=True)
    report = ProcessReport(role=role, rank=rank, pid=pid, attempt=attempt, time=time, since=0, **fields)
    path = layout.report_file(role, rank)
    temporary = path.with_name("new")
    temporary.write_bytes(msgspec.json.encode(report))
    temporary.replace(path)


def make_log(directory: Path) -> tuple[RunLog, io.StringIO]:
    """Return a log and the stream to which it writes."""
    written = io.StringIO()
    return RunLog(io.StringIO(), written, now=lambda: "12:00:00"), written
