"""Runs environments in worker processes: chooses the worker of a group, and restarts a worker that ends or hangs.

Owned by the orchestrator (and `eval`), which asks through `environments.port`. User code never runs in their process.
If a worker ends, the groups that it ran raise WorkerLost and the worker is restarted. A group that is lost for the third time
raises RolloutFailed: it is treated as the cause. After its second loss a group runs alone among such groups of its environment, so
that the one that ends its worker does not fail the others.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trivet.environments.examples import other_data
from trivet.environments.workers.answers import find_fault
from trivet.environments.workers.client import WorkerClient
from trivet.environments.workers.memory import MEASURE_INTERVAL_S, describe_excess, measure_sessions
from trivet.environments.workers.restarts import RestartBudget
from trivet.environments.workers.worker_directory import sweep_directories
from trivet.environments.workers.worker_log import WorkerLog
from trivet.errors import EnvironmentLoadError, RoleFailed, RolloutFailed, WorkerLost, first_error
from trivet.process.loop_lag import lag_metrics
from trivet.wire.events import EnvLoad, EnvRestart, Event
from trivet.wire.groups import EnvironmentInfo, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.workers import HostSettings

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""A group that is lost this often is treated as the cause: other groups of the same worker are rarely lost three times."""

_WATCH_INTERVAL_S = 1.0
_WARN_BLOCKED_S = 10.0
"""A worker whose event loop is blocked for longer is reported once: reward functions often compute for a few seconds."""
_CLOSE_TIMEOUT_S = 5.0
_REFUSED = "AnswerRefused"
"""The kind of failure of a group whose answer cannot be true."""
_TIMEOUT_GRACE_S = 30.0
"""How long a worker has, beyond a group's own time limit, to report itself that the group exceeded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """The number of workers of a pool, and the times it waits for them."""

    workers_per_env: int = 1
    max_restarts: int = 5
    """Consecutive restarts of one worker; -1: no limit."""
    blocked_timeout_s: float = 600.0
    start_timeout_s: float = 1800.0
    max_memory_bytes: int | None = None
    """Most memory of one worker with all that it started; None: no limit."""
    strict_data: bool = False
    """Refuse a worker whose data are not those of the first."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """The place of one worker; each restart puts a new worker in it."""

    name: str
    settings: HostSettings
    budget: RestartBudget
    worker: WorkerClient | None = None
    """The ready worker; None while it is being started."""
    starting: WorkerClient | None = None
    """The worker that is loading its environment."""
    is_warned: bool = False
    """The log has a warning that the worker is blocked."""


@dataclass(slots=True, kw_only=True)
class _Environment:
    info: EnvironmentInfo
    slots: list[_Slot]
    log: WorkerLog
    is_loaded: bool = False
    """`info` is that of the first worker, with which later ones are compared."""
    suspects: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one group that was lost twice and may run now."""


class WorkerPool:
    """An `EnvironmentPool` of worker processes."""

    def __init__(
        self,
        settings: Sequence[HostSettings],
        *,
        log_of: Callable[[str], Path],
        limits: PoolLimits,
        name_suffix: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with no worker.

        Args:
            log_of: returns the file that the output of an environment's workers is appended to, given its name.
            name_suffix: of the names of workers, where a run has several pools.
        """
        self._settings = settings
        self._name_suffix = name_suffix
        self._log_of = log_of
        self._limits = limits
        self._clock = clock
        self._environments: dict[str, _Environment] = {}
        self._losses: Counter[tuple[str, Split, int]] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._changed = asyncio.Condition()
        self._write_event: Callable[[Event], None] = lambda event: None

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        """See `EnvironmentPool.infos`."""
        return {name: environment.info for name, environment in self._environments.items()}

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """Write an event with `write_event` for each environment that is loaded, and at every restart from now on."""
        self._write_event = write_event
        for name, environment in self._environments.items():
            worker = environment.slots[0].worker
            if worker is not None and worker.hello is not None:
                hello = worker.hello
                write_event(
                    EnvLoad(
                        env=name,
                        package=worker.package,
                        api=worker.api,
                        verifiers=hello.verifiers,
                        python=hello.python,
                        worker=hello.worker,
                    )
                )

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group on the worker with the fewest pending ones; see `EnvironmentPool.run_group`."""
        environment = self._environments[request.env]
        key = (request.env, request.split, request.group_id)
        if self._losses[key] < MAX_LOSSES - 1:
            return await self._run(environment, request, key)
        async with environment.suspects:
            return await self._run(environment, request, key)

    async def _run(self, environment: _Environment, request: GroupRequest, key: tuple[str, Split, int]) -> list[Rollout]:
        slot, worker = await self._choose(environment)
        try:
            rollouts = await _limit_time(slot.settings.rollout_timeout_s, worker.run_group(request), request)
        except WorkerLost as exc:
            self._losses[key] += 1
            if self._losses[key] < MAX_LOSSES:
                raise
            del self._losses[key]
            self._failures[request.env, "WorkerLost"] += 1
            raise RolloutFailed(
                f"group {request.group_id} (example {request.example_id} of environment {request.env!r}) was lost with its "
                f"worker {MAX_LOSSES} times, the last time because {exc}",
                kind="WorkerLost",
            ) from exc
        except RolloutFailed as exc:
            slot.budget.finished_a_group()
            self._failures[request.env, exc.kind] += 1
            del self._losses[key]
            raise
        slot.budget.finished_a_group()
        del self._losses[key]
        if fault := find_fault(rollouts, request):
            self._failures[request.env, _REFUSED] += 1
            raise RolloutFailed(
                f"environment worker {slot.name} (pid {worker.pid}): its answer for group {request.group_id} (example "
                f"{request.example_id}) {fault}; it is not used",
                kind=_REFUSED,
            )
        return rollouts

    async def prompt(self, env: str, *, split: Split, example_id: int) -> list[dict[str, Any]]:
        """Return the messages that an example starts with."""
        _, worker = await self._choose(self._environments[env])
        return await worker.prompt(split=split, example_id=example_id)

    def status(self) -> list[WorkerStatus]:
        """Return what each worker is doing. May be called from another thread."""
        return [
            worker.status(num_restarts=slot.budget.num_restarts)
            for slot in self._slots()
            if (worker := slot.worker or slot.starting) is not None
        ]

    def metrics(self) -> dict[str, float]:
        """Return load, lag and restarts by worker, and failed groups by environment and type of error, since the last call."""
        values: dict[str, float] = {}
        for slot in self._slots():
            values[f"worker/{slot.name}/pending"] = float(slot.worker.num_pending if slot.worker else 0)
            values[f"worker/{slot.name}/restarts"] = float(slot.budget.num_restarts)
            lags = slot.worker.pulses.take_lags() if slot.worker else []
            values |= lag_metrics(f"worker_lag/{slot.name}", lags, ("mean", "max", "p90"))
        values |= {f"failed_groups/{env}/{kind}": float(count) for (env, kind), count in self._failures.items()}
        self._failures.clear()
        return values

    async def aclose(self) -> None:
        """End every worker. May be called again."""
        workers = [worker for slot in self._slots() if (worker := slot.worker or slot.starting) is not None]
        await asyncio.gather(*(worker.aclose(timeout_s=_CLOSE_TIMEOUT_S) for worker in workers))
        for environment in self._environments.values():
            environment.log.limit_size()

    async def start(self) -> None:
        """Start all workers and wait until they have loaded their environments.

        Raises:
            EnvironmentLoadError: an environment cannot be loaded.
            WorkerLost: a worker ended while it loaded.
            WaitTimeout: one took too long.
        """
        await asyncio.to_thread(sweep_directories)
        self._environments = {settings.name: self._make_environment(settings) for settings in self._settings}
        try:
            async with asyncio.TaskGroup() as tasks:
                measuring = tasks.create_task(self._measure(), name="measure-workers")
                async with asyncio.TaskGroup() as starts:
                    for slot in self._slots():
                        starts.create_task(self._start_worker(slot), name=f"start-{slot.name}")
                measuring.cancel()
        except ExceptionGroup as failed:  # the first failure has ended the others
            raise first_error(failed) from None
        for environment in self._environments.values():
            infos = [await slot.worker.loaded(timeout_s=0.0) for slot in environment.slots if slot.worker is not None]
            environment.info = infos[0]
            for slot, info in zip(environment.slots, infos, strict=True):
                self._compare(slot, info)
            environment.is_loaded = True

    async def run(self) -> None:
        """Restart workers that end or hang, until cancelled.

        Raises:
            RoleFailed: a worker ended too often.
        """
        async with asyncio.TaskGroup() as tasks:
            for slot in self._slots():
                tasks.create_task(self._keep_alive(slot), name=f"keep-{slot.name}")
            tasks.create_task(self._watch(), name="watch-workers")
            tasks.create_task(self._measure(), name="measure-workers")

    def _make_environment(self, settings: HostSettings) -> _Environment:
        slots = [
            _Slot(
                name=f"{settings.name}-{index}{self._name_suffix}",
                # The first worker's hashes name the examples; `_compare` says when another has other data.
                settings=settings if index == 0 else msgspec.structs.replace(settings, hash_keys=[]),
                budget=RestartBudget(limit=self._limits.max_restarts),
            )
            for index in range(self._limits.workers_per_env)
        ]
        log = WorkerLog(self._log_of(settings.name))
        return _Environment(info=EnvironmentInfo(num_examples=0), slots=slots, log=log)

    def _slots(self) -> list[_Slot]:
        return [slot for environment in self._environments.values() for slot in environment.slots]

    async def _choose(self, environment: _Environment) -> tuple[_Slot, WorkerClient]:
        """Return the ready worker with the fewest pending groups. The wait while none is ready ends when `_keep_alive` gives up."""
        while True:
            ready = [(slot, slot.worker) for slot in environment.slots if slot.worker is not None]
            if ready:
                return min(ready, key=lambda pair: pair[1].num_pending)
            async with self._changed:
                await self._changed.wait_for(lambda: any(slot.worker for slot in environment.slots))

    async def _start_worker(self, slot: _Slot) -> None:
        log = self._environments[slot.settings.name].log
        worker = await WorkerClient.start(slot.settings, log=log, clock=self._clock)
        slot.starting = worker
        info = await worker.loaded(timeout_s=self._limits.start_timeout_s)
        if self._environments[slot.settings.name].is_loaded:
            self._compare(slot, info)
        slot.worker, slot.starting, slot.is_warned = worker, None, False
        async with self._changed:
            self._changed.notify_all()

    def _compare(self, slot: _Slot, info: EnvironmentInfo) -> None:
        """Say when a worker has other data than those that the run knows the environment by."""
        difference = other_data(self._environments[slot.settings.name].info, info)
        if difference is None:
            return
        what = (
            f"environment worker {slot.name} has {difference}: the same example is another one there. Data that are drawn at every "
            "start need a seed, for example in args of the environment"
        )
        if self._limits.strict_data:
            raise EnvironmentLoadError(f"{what}; strict_data = true refuses that")
        logger.warning("%s", what)

    async def _keep_alive(self, slot: _Slot) -> None:
        while True:
            assert slot.worker is not None
            worker = slot.worker
            cause = await worker.ended()
            slot.worker = None
            await self._restart(slot, worker, cause)

    async def _restart(self, slot: _Slot, worker: WorkerClient, cause: str) -> None:
        while True:
            delay_s = slot.budget.next_delay_s()
            if delay_s is None:
                raise RoleFailed(
                    f"environment worker {slot.name} {cause}, {slot.budget.num_consecutive + 1} times in a row without finishing a "
                    f"group; max_env_worker_restarts is {slot.budget.limit}.{worker.last_lines()}"
                )
            logger.warning("environment worker %s %s; starting it again in %.1f s", slot.name, cause, delay_s)
            self._write_event(EnvRestart(env=slot.settings.name, worker=slot.name, pid=worker.pid, cause=cause))
            await asyncio.sleep(delay_s)
            try:
                await self._start_worker(slot)
            except (WorkerLost, EnvironmentLoadError) as exc:
                cause = str(exc)
                assert slot.starting is not None
                worker, slot.starting = slot.starting, None
                await worker.aclose(timeout_s=0.0)
            else:
                return

    async def _watch(self) -> None:
        """Report, and in the end kill, workers whose event loop is blocked."""
        before = self._clock()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = self._clock()
            was_suspended, before = now - before > 3 * _WATCH_INTERVAL_S, now
            for slot in self._slots():
                if slot.worker is None:
                    continue
                if was_suspended:
                    slot.worker.pulses.restart_silence()
                await self._handle_blocked(slot, slot.worker)

    async def _measure(self) -> None:
        """End workers that take too much memory, and cut logs that are too long. Loading may take the most, so it counts too."""
        for turn in itertools.count(1):
            await asyncio.sleep(MEASURE_INTERVAL_S)
            if self._limits.max_memory_bytes is not None:
                workers = [worker for slot in self._slots() if (worker := slot.worker or slot.starting) is not None]
                taken = await measure_sessions([worker.pid for worker in workers], turn=turn)
                for worker in workers:
                    if taken[worker.pid] > self._limits.max_memory_bytes:
                        worker.end(describe_excess(taken[worker.pid], self._limits.max_memory_bytes))
            for environment in self._environments.values():
                environment.log.limit_size()

    async def _handle_blocked(self, slot: _Slot, worker: WorkerClient) -> None:
        blocked_s = worker.pulses.blocked_for_s()
        if blocked_s > self._limits.blocked_timeout_s:
            await worker.kill(
                f"was ended because its event loop was blocked for {blocked_s:.0f} s "
                "(env_worker_timeout_s); where it was is in its log"
            )
        elif blocked_s > _WARN_BLOCKED_S and not slot.is_warned:
            slot.is_warned = True
            logger.warning(
                "environment worker %s (pid %s) has been blocked for %.0f s: synchronous code of the environment holds its "
                "event loop; %s groups wait in it",
                slot.name,
                worker.pid,
                blocked_s,
                worker.num_pending,
            )
        elif blocked_s == 0.0:
            slot.is_warned = False


async def _limit_time(timeout_s: float | None, running: Awaitable[list[Rollout]], request: GroupRequest) -> list[Rollout]:
    """Limit the time of a group whose worker does not: its environment swallows the cancellation, or blocks the event loop."""
    try:
        async with asyncio.timeout(None if timeout_s is None else timeout_s + _TIMEOUT_GRACE_S):
            return await running
    except TimeoutError as exc:
        raise RolloutFailed(
            f"group {request.group_id} (example {request.example_id} of environment {request.env!r}) did not end when its time "
            f"was over (rollout_timeout_s, {timeout_s:g} s): its code must let asyncio.CancelledError pass",
            kind="TimeoutError",
        ) from exc


@asynccontextmanager
async def open_worker_pool(
    settings: Sequence[HostSettings], *, log_of: Callable[[str], Path], limits: PoolLimits, name_suffix: str = ""
) -> AsyncIterator[WorkerPool]:
    """Open a pool with every environment loaded; `WorkerPool.run` keeps its workers alive. Arguments are those of `WorkerPool`."""
    pool = WorkerPool(settings, log_of=log_of, limits=limits, name_suffix=name_suffix)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.aclose()
