"""Runs environments in worker processes: chooses the worker of a group, and restarts a worker that ends or hangs.

The orchestrator and `eval` each own a pool, and use it through `environments.port`. User code never runs in their process.
If a worker ends, the groups that it ran raise WorkerLost and the worker is restarted. A group that is lost for the third time
raises RolloutFailed, because it is treated as the cause. A group that was lost twice is a suspect: the suspects of an environment
run one at a time, so that the group which ends its worker does not make other suspects fail.
"""

import asyncio
import itertools
import logging
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trivet.backoff import backoff_s
from trivet.config.schema.environment import EnvWorkersConfig
from trivet.environments.examples import describe_difference, require_data
from trivet.environments.settings import explain_problem
from trivet.environments.workers.client import WorkerClient
from trivet.environments.workers.limits import WorkerLog, measure_sessions, memory_limit, sweep_directories
from trivet.errors import EnvironmentLoadError, RoleFailed, RolloutFailed, TrivetError, WaitTimeout, WorkerLost
from trivet.process.event_loop import lag_metrics
from trivet.wire.events import EnvRestart, Event
from trivet.wire.groups import EnvironmentInfo, Example, GroupRequest, Split
from trivet.wire.rollouts import Rollout
from trivet.wire.status import WorkerStatus
from trivet.wire.workers import HostSettings

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""A group that is lost this many times is treated as the cause: other groups of the same worker are rarely lost three times."""

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
"""Longest pause before a worker is restarted. The pause doubles with each consecutive restart."""
_WATCH_INTERVAL_S = 0.5
"""Seconds between two checks of the workers. A worker can take a few GiB of memory in that time."""
_SUSPENDED_AFTER_S = 3.0
"""If this long passes between two checks, this process was suspended, and could not receive its workers' pulses."""
_WARN_BLOCKED_S = 10.0
"""A worker whose event loop is blocked for longer is reported once; reward functions often compute for a few seconds."""
_CLOSE_TIMEOUT_S = 5.0
"""Longest time for a worker to end by itself when the pool closes."""
_TIMEOUT_GRACE_S = 30.0
"""Seconds beyond a group's time limit in which its worker should report itself that the limit was exceeded."""


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """The restarts of one worker. Only consecutive ones count: a worker that finishes groups in between is worth restarting."""

    limit: int
    """Consecutive restarts that are allowed; -1: no limit."""
    num_restarts: int = 0
    num_consecutive: int = 0
    """Restarts since the worker last finished a group."""

    def next_delay_s(self) -> float | None:
        """Count a restart and return how long to wait before it, in seconds; None when the limit is reached."""
        if 0 <= self.limit <= self.num_consecutive:
            return None
        self.num_restarts += 1
        self.num_consecutive += 1
        return backoff_s(self.num_consecutive, first_s=_FIRST_DELAY_S, max_s=_MAX_DELAY_S)


@dataclass(slots=True, kw_only=True)
class _Slot:
    """The place of one worker. After each restart it holds the new worker."""

    name: str
    settings: HostSettings
    budget: RestartBudget
    worker: WorkerClient | None = None
    """None before the first start."""
    is_ready: bool = False
    """True while the worker has its environment loaded and has not ended."""
    is_block_reported: bool = False
    """True when the log has a warning that the worker is blocked now."""


@dataclass(slots=True, kw_only=True)
class _Environment:
    slots: list[_Slot]
    log: WorkerLog
    info: EnvironmentInfo | None = None
    """Describes the first worker's data, with which those of later workers are compared; None before all have loaded."""
    suspect_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one suspect that may run now."""


class WorkerPool:
    """An `EnvironmentPool` of worker processes."""

    def __init__(
        self,
        settings: Sequence[HostSettings],
        *,
        log_of: Callable[[str], Path],
        limits: EnvWorkersConfig,
        name_suffix: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a pool without workers; `start` starts them.

        Args:
            settings: one entry for each environment.
            log_of: returns the log file of an environment's workers, given the environment's name.
            name_suffix: appended to the names of workers, where a run has several pools.
        """
        self._limits = limits
        self._max_memory_bytes = memory_limit(limits.max_worker_memory)
        self._clock = clock
        self._environments: dict[str, _Environment] = {}
        for env in settings:
            slots = [
                _Slot(
                    name=f"{env.name}-{index}{name_suffix}",
                    # Only the first worker's hashes of examples are used; `_check_data` reports a worker with other data.
                    settings=env if index == 0 else msgspec.structs.replace(env, hash_keys=[]),
                    budget=RestartBudget(limit=limits.max_env_worker_restarts),
                )
                for index in range(limits.workers_per_env)
            ]
            self._environments[env.name] = _Environment(slots=slots, log=WorkerLog(log_of(env.name)))
        self._losses: Counter[tuple[str, Split, int]] = Counter()
        """Lost workers of each unfinished group, by environment, split and group id."""
        self._failures: Counter[tuple[str, str]] = Counter()
        """Failed groups since the last call of `metrics`, by environment and type of error."""
        self._slot_ready = asyncio.Condition()
        """Notified when a worker has loaded its environment."""
        self._write_event: Callable[[Event], None] = lambda event: None

    @property
    def infos(self) -> Mapping[str, EnvironmentInfo]:
        """See `EnvironmentPool.infos`."""
        return {name: environment.info for name, environment in self._environments.items() if environment.info is not None}

    def report_to(self, write_event: Callable[[Event], None]) -> None:
        """See `EnvironmentPool.report_to`."""
        self._write_event = write_event
        for environment in self._environments.values():
            worker = environment.slots[0].worker
            if worker is not None and worker.load_event is not None:
                write_event(worker.load_event)

    async def run_group(self, request: GroupRequest) -> list[Rollout]:
        """Run a group on the worker with the fewest pending ones; see `EnvironmentPool.run_group`."""
        environment, key = self._environments[request.env], (request.env, request.split, request.group_id)
        where = f"group {request.group_id} (example {request.example_id} of environment {request.env!r})"
        is_suspect = self._losses[key] == MAX_LOSSES - 1
        failure: Exception
        async with environment.suspect_lock if is_suspect else nullcontext():
            slot, worker = await self._choose(environment)
            timeout_s = slot.settings.rollout_timeout_s
            try:
                # The worker limits the time too. This limit is for code that catches the cancellation or blocks the event loop.
                async with asyncio.timeout(None if timeout_s is None else timeout_s + _TIMEOUT_GRACE_S):
                    rollouts = await worker.run_group(request)
            except WorkerLost as exc:
                self._losses[key] += 1
                if self._losses[key] < MAX_LOSSES:
                    raise
                lost = f"{where} was lost with its worker {MAX_LOSSES} times, the last time because {exc}"
                failure = RolloutFailed(lost, kind="WorkerLost")
                failure.__cause__ = exc
            except (RolloutFailed, TimeoutError) as exc:
                failure, slot.budget.num_consecutive = exc, 0
            else:
                slot.budget.num_consecutive = 0
                del self._losses[key]
                return rollouts
        del self._losses[key]
        if not isinstance(failure, RolloutFailed):  # the TimeoutError of this process's own limit
            late = f"{where} did not end when its time was over (rollout_timeout_s, {timeout_s:g} s)"
            failure = RolloutFailed(f"{late}: its code must let asyncio.CancelledError pass", kind="TimeoutError")
        self._failures[request.env, failure.kind] += 1
        raise failure

    async def example(self, env: str, *, split: Split, example_id: int) -> Example:
        """Return an example of the data."""
        _, worker = await self._choose(self._environments[env])
        return await worker.example(split=split, example_id=example_id)

    async def _choose(self, environment: _Environment) -> tuple[_Slot, WorkerClient]:
        """Return the ready worker with the fewest pending groups. While none is ready, wait; `_keep_alive` may end the run then."""
        while True:
            ready = [(slot, slot.worker) for slot in environment.slots if slot.is_ready and slot.worker is not None]
            if ready:
                return min(ready, key=lambda pair: pair[1].num_pending)
            async with self._slot_ready:
                await self._slot_ready.wait_for(lambda: any(slot.is_ready for slot in environment.slots))

    def status(self) -> list[WorkerStatus]:
        """See `EnvironmentPool.status`."""
        return [worker.status(num_restarts=slot.budget.num_restarts) for slot, worker in self._workers()]

    def metrics(self) -> dict[str, float]:
        """See `EnvironmentPool.metrics`."""
        values: dict[str, float] = {}
        for slot, worker in self._workers():
            values[f"worker/{slot.name}/pending"] = float(worker.num_pending)
            values[f"worker/{slot.name}/restarts"] = float(slot.budget.num_restarts)
            values |= lag_metrics(f"worker_lag/{slot.name}", worker.pulses.take_lags(), ("mean", "max", "p90"))
        values |= {f"failed_groups/{env}/{kind}": float(count) for (env, kind), count in self._failures.items()}
        self._failures.clear()
        return values

    async def start(self) -> None:
        """Start all workers and wait until they have loaded their environments.

        Raises:
            EnvironmentLoadError: an environment cannot be loaded. The message names every environment that cannot be loaded.
            WorkerLost: a worker ended while it loaded its environment.
            WaitTimeout: a worker took too long.
        """
        await asyncio.to_thread(sweep_directories)
        slots = [slot for environment in self._environments.values() for slot in environment.slots]
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(), name="watch-workers")
            results = await asyncio.gather(*(self._start_worker(slot) for slot in slots), return_exceptions=True)
            watching.cancel()
        problems: dict[str, str] = {}
        for slot, result in zip(slots, results, strict=True):
            if isinstance(result, EnvironmentLoadError | WorkerLost | WaitTimeout):
                problems.setdefault(slot.settings.name, explain_problem(str(result), slot.settings))
            elif isinstance(result, BaseException):
                raise result
        if problems:
            first_error = next(result for result in results if isinstance(result, TrivetError))
            raise type(first_error)("\n- ".join(problems.values())) from first_error
        for slot, info in zip(slots, results, strict=True):
            assert isinstance(info, EnvironmentInfo)
            environment = self._environments[slot.settings.name]
            environment.info = environment.info or info
            self._check_data(slot, environment.info, info)

    async def run(self) -> None:
        """Restart workers that end or hang, until cancelled.

        Raises:
            RoleFailed: a worker ended too often.
        """
        async with asyncio.TaskGroup() as tasks:
            for slot, worker in self._workers():
                tasks.create_task(self._keep_alive(slot, worker), name=f"keep-{slot.name}")
            tasks.create_task(self._watch(), name="watch-workers")

    async def aclose(self) -> None:
        """End every worker. May be called again."""
        await asyncio.gather(*(worker.aclose(timeout_s=_CLOSE_TIMEOUT_S) for _, worker in self._workers()))
        for environment in self._environments.values():
            environment.log.limit_size()

    def _workers(self) -> list[tuple[_Slot, WorkerClient]]:
        """Return the workers that were started, also those that still load and those that have ended."""
        slots = [slot for environment in self._environments.values() for slot in environment.slots]
        return [(slot, slot.worker) for slot in slots if slot.worker is not None]

    async def _start_worker(self, slot: _Slot) -> EnvironmentInfo:
        """Start a worker in a slot and wait until it has loaded its environment; raises as `start`."""
        environment = self._environments[slot.settings.name]
        slot.worker = await WorkerClient.start(slot.settings, log=environment.log, clock=self._clock)
        info = await slot.worker.wait_loaded(timeout_s=self._limits.env_start_timeout_s)
        if environment.info is not None:
            self._check_data(slot, environment.info, info)
        slot.is_ready, slot.is_block_reported = True, False
        async with self._slot_ready:
            self._slot_ready.notify_all()
        return info

    def _check_data(self, slot: _Slot, first: EnvironmentInfo, info: EnvironmentInfo) -> None:
        """Warn when a worker's data differ from those of the environment's first worker; with `strict_data` raise."""
        difference = describe_difference(first, info)
        if difference is None:
            return
        message = (
            f"environment worker {slot.name} has {difference}: the same example is another one there. Data that are drawn at every "
            "start need a seed, for example in args of the environment"
        )
        if self._limits.strict_data:
            raise EnvironmentLoadError(f"{message}; strict_data = true refuses that")
        logger.warning("%s", message)

    async def _keep_alive(self, slot: _Slot, worker: WorkerClient) -> None:
        """Restart the worker of a slot whenever it ends, until cancelled.

        Raises:
            RoleFailed: the worker ended too often.
        """
        cause = await worker.ended()
        while True:
            slot.is_ready = False
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
                assert slot.worker is not None
                worker = slot.worker
                cause = await worker.ended()
            except (WorkerLost, EnvironmentLoadError) as exc:
                assert slot.worker is not None
                worker, cause = slot.worker, str(exc)
                await worker.aclose(timeout_s=0.0)

    async def _watch(self) -> None:
        """End workers that take too much memory, also while they load, or that are blocked; cut logs that are too long."""
        checked_at = self._clock()
        for check_number in itertools.count(1):
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = self._clock()
            was_suspended, checked_at = now - checked_at > _SUSPENDED_AFTER_S, now
            bytes_by_pid = await measure_sessions([worker.pid for _, worker in self._workers()], check_number=check_number)
            for _, worker in self._workers():
                num_bytes = bytes_by_pid.get(worker.pid, 0)
                if num_bytes > self._max_memory_bytes:
                    used, limit = (f"{number / 2**30:.2f} GiB" for number in (num_bytes, self._max_memory_bytes))
                    worker.end(f"was ended because it had {used} of memory, and max_worker_memory is {limit}")
            for slot, worker in self._workers():
                if slot.is_ready and was_suspended:
                    worker.pulses.expect()
                if slot.is_ready:
                    self._handle_blocked(slot, worker)
            for environment in self._environments.values():
                environment.log.limit_size()

    def _handle_blocked(self, slot: _Slot, worker: WorkerClient) -> None:
        """Report a worker whose event loop is blocked, and end it when that lasts for `env_worker_timeout_s`."""
        blocked_s = worker.pulses.blocked_for_s()
        if blocked_s > self._limits.env_worker_timeout_s:
            cause = (
                f"was ended because its event loop was blocked for {blocked_s:.0f} s (env_worker_timeout_s); where it was is in "
                "its log"
            )
            worker.end(cause, with_stacks=True)
        elif blocked_s > _WARN_BLOCKED_S and not slot.is_block_reported:
            logger.warning(
                "environment worker %s (pid %s) has been blocked for %.0f s: synchronous code of the environment holds its "
                "event loop; %s groups wait in it",
                slot.name,
                worker.pid,
                blocked_s,
                worker.num_pending,
            )
        slot.is_block_reported = blocked_s > _WARN_BLOCKED_S


@asynccontextmanager
async def open_worker_pool(
    settings: Sequence[HostSettings], *, log_of: Callable[[str], Path], limits: EnvWorkersConfig, name_suffix: str = ""
) -> AsyncIterator[WorkerPool]:
    """Open a pool and load every environment. The caller runs `WorkerPool.run`. The arguments are those of `WorkerPool`."""
    pool = WorkerPool(settings, log_of=log_of, limits=limits, name_suffix=name_suffix)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.aclose()


def require_loadable(
    settings: Sequence[HostSettings], *, trained: Collection[str], timeout_s: float
) -> Mapping[str, EnvironmentInfo]:
    """Load every environment in a worker, as a run does, and end the workers. Return the description of each environment's data.

    Args:
        trained: names of the environments that need examples to train on.

    Raises:
        EnvironmentLoadError: environments cannot be loaded or have no data. The message names all of them.
    """

    async def load(directory: Path) -> Mapping[str, EnvironmentInfo]:
        limits = EnvWorkersConfig(env_start_timeout_s=timeout_s)
        async with open_worker_pool(settings, log_of=lambda env: directory / f"{env}.log", limits=limits) as pool:
            return pool.infos

    with tempfile.TemporaryDirectory(prefix="trivet-check-") as directory:
        try:
            infos = asyncio.run(load(Path(directory)))
        except (WorkerLost, WaitTimeout) as exc:
            raise EnvironmentLoadError(str(exc)) from exc
    require_data(infos, trained=trained, hash_keys=settings[0].hash_keys if settings else ())
    return infos
