"""Runs the orchestrator's loop: fill batch n, write its checkpoint part if one is due, send the batch, continue with n+1.

    Dispatcher --finished groups--> GroupBuffer --batch n--> Loop --pack, write, send--> trainer
        ^                                                      |                            |
        +---------- the step being filled ---------------------+                            v
        +---------- the policy served ------ PolicyWatcher <--------- weights/step_n -------+

| waits for | unblocked by |
|---|---|
| `_fill`: enough ready groups | `fill_changed`, notified by the dispatcher and by `preempt` |
| `_hand_over`: the servers to sleep (`before_send`) | the answer of each server; `client.wait_for_ready_timeout` |
| `_hand_over`: the trainer's receipt of batch n | the trainer's acknowledgement; `rollout_transport.timeout_s` |
| `run`: the evaluation of the last policy | the end of `OnlineEval.run` |

Dispatcher, policy watcher and background tasks run in one asyncio.TaskGroup, so a failure of any of them ends all. Packing and
writing run in threads and sending is awaited, so the dispatcher collects groups for the next batch meanwhile.

Python's full garbage collection visits every object that may be part of a cycle. With ten thousand rollouts in flight this stops
the event loop for a fifth of a second, about once a second. Few objects here are in cycles. So the loop starts full collections by
the clock instead of by the number of new objects, and excludes the objects that existed at its start.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trivet.algorithms.packing import PackItem, pack
from trivet.checkpoints.run_record import require_newest_attempt
from trivet.checkpoints.settings import DataRecord
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import BatchError
from trivet.orchestrator.buffer import GroupBuffer, GroupCounters
from trivet.orchestrator.checkpoint import OrchestratorPart, RunTotals, write_part, write_rollouts
from trivet.orchestrator.dispatcher import ChangeEvent, Dispatcher
from trivet.orchestrator.metrics import batch_metrics, flow_metrics, progress_metrics
from trivet.orchestrator.online_eval import OnlineEval
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.replay import ReplaySource, UnservedPolicy
from trivet.orchestrator.sampler import ExampleSampler
from trivet.telemetry import process_report
from trivet.telemetry.metrics import timed
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.messages import BatchSender
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.rollouts import Group
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)

BackgroundTask = Callable[[], Coroutine[Any, Any, None]]
"""A coroutine function that runs concurrently with the loop until it is cancelled."""

_MAX_ALIVE_INTERVAL_S = 30.0
"""Longest time between two `say_alive` messages to the trainer. A tenth of `rollout_transport.timeout_s` if that is shorter."""
_SLOW_FILL_S = 60.0
"""If no group ends for this long, a warning is logged that the batch is not filled."""
_YOUNG_THRESHOLD = 50_000
"""New objects before Python collects the young generation, which takes milliseconds."""
_MIDDLE_THRESHOLD = 20
"""Collections of the young generation before the middle one is collected too."""
_FULL_THRESHOLD = 1_000_000
"""Collections of the middle generation before a full collection: more than any run has, so that none starts by itself."""
_FULL_COLLECTION_INTERVAL_S = 60.0
"""Seconds between two full collections, each of which stops the event loop for about a fifth of a second."""


@contextmanager
def rare_collections() -> Generator[None, None, None]:
    """Prevent automatic full collections within the block, and exclude the objects that exist now from collection."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD, _MIDDLE_THRESHOLD, _FULL_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect_at_intervals() -> None:
    """Make a full collection at each interval, until cancelled."""
    while True:
        await asyncio.sleep(_FULL_COLLECTION_INTERVAL_S)
        gc.collect()


@dataclass(slots=True, kw_only=True)
class Loop:
    """Runs the orchestrator from batch `progress.step` + 1 to the end of the run."""

    config: OrchestratorConfig
    layout: RunLayout
    progress: RunTotals
    sampler: ExampleSampler | ReplaySource
    buffer: GroupBuffer
    dispatcher: Dispatcher | ReplaySource
    watcher: PolicyWatcher | UnservedPolicy
    sender: BatchSender
    telemetry: Telemetry
    fill_changed: ChangeEvent
    """Notified when a group ended or a preemption is requested: `_fill` must check again."""
    background_tasks: Mapping[str, BackgroundTask] = field(default_factory=dict[str, BackgroundTask])
    """Further tasks by name, such as those that watch the servers and their load. The loop cancels them at its end."""
    evals: OnlineEval | None = None
    """Evaluations during the run; None when none are configured."""
    gauges: Callable[[], Mapping[str, float]] = dict
    """Returns further metrics. Called at the end of each step."""
    data: Mapping[str, DataRecord] = field(default_factory=dict[str, DataRecord])
    """Record of the environments' data sets, kept in every checkpoint."""
    before_send: Callable[[], Awaitable[None]] | None = None
    """Puts the servers to sleep, in a run whose trainer needs their GPU memory; None in any other run. Called when a batch is ready
    to be sent, because the trainer begins its step as soon as it has the batch."""
    preempt_requested: bool = False
    """Set by `preempt`."""
    is_exhausted: bool = False
    """Set when a replay has no groups left for another batch."""

    def preempt(self) -> None:
        """Request a preemption: fill no further batch, have the trainer commit the last batch sent, and end."""
        self.preempt_requested = True
        self.fill_changed.notify()

    async def run(self) -> None:
        """Fill and send batches until `max_steps` is reached or the run is preempted."""
        with rare_collections():
            async with asyncio.TaskGroup() as tasks:
                dispatching = tasks.create_task(self.dispatcher.run(), name="dispatcher")
                coroutines = {
                    "policy-watcher": self.watcher.run,
                    "alive": self._send_alive,
                    "garbage": _collect_at_intervals,
                    **self.background_tasks,
                }
                background = [tasks.create_task(run(), name=name) for name, run in coroutines.items()]
                evaluating = tasks.create_task(self.evals.run(), name="evaluations") if self.evals is not None else None
                await self._run_steps(dispatching)
                dispatching.cancel()
                if evaluating is not None and self.preempt_requested:
                    evaluating.cancel()
                elif evaluating is not None and self.evals is not None:
                    # The watcher loads the policy that the batch of its step requires: here, that of the last step.
                    self.watcher.step = Step(self.progress.step + 1 + self.config.max_async_level)
                    self.evals.finish(PolicyVersion(self.progress.step))
                    with process_report.waiting("the evaluation of the last policy", on="trainer"):
                        await evaluating
                for task in background:
                    task.cancel()

    async def _send_alive(self) -> None:
        """Tell the trainer at intervals that the orchestrator is alive.

        A batch may take long to fill, because of an evaluation or slow environments. The trainer's deadline must expire only
        when the orchestrator is gone or hangs.
        """
        while True:
            await self.sender.say_alive()
            await asyncio.sleep(min(_MAX_ALIVE_INTERVAL_S, self.config.rollout_transport.timeout_s / 10))

    async def _run_steps(self, dispatching: asyncio.Task[None]) -> None:
        """Fill and send the batches. The task `dispatching` is cancelled when the last batch is formed."""
        step = Step(self.progress.step + 1)
        # Checkpoint part of the last batch that was sent, if it was not due. A preemption writes it.
        unwritten_part: OrchestratorPart | None = None
        self._begin(step)
        while self.config.max_steps is None or step <= self.config.max_steps:
            started = time.monotonic()
            groups = await self._fill(step)
            if groups is None:
                await self._send_ending(step, unwritten_part)
                return
            # No await before `_hand_over`, so that checkpoint part and counters have the state in which the batch was formed.
            part = OrchestratorPart(
                progress=self.progress,
                sampler=self.sampler.snapshot(),
                buffer=self.buffer.snapshot(also_in_flight=self.dispatcher.undispatched_draws),
                rollouts_per_example=self.config.rollouts_per_example,
            )
            is_due = self.config.ckpt.is_due(step, max_steps=self.config.max_steps)
            counters, self.buffer.counters = self.buffer.counters, GroupCounters()
            values = flow_metrics(
                counters,
                groups,
                version=self.watcher.version,
                step=step,
                group_size=self.config.rollouts_per_example,
                num_in_flight=self.buffer.num_in_flight,
                num_ready=self.buffer.num_ready,
            )
            counters.report_overlong(step=step)
            values |= self.sampler.metrics()
            if step == self.config.max_steps:
                dispatching.cancel()
            else:
                self._begin(Step(step + 1))
            filled = time.monotonic()
            version = self.watcher.version
            values |= {"time/generate_completions": filled - started, "time/update_weights": self.watcher.last_load_s}
            values |= await self._hand_over(step, groups, part, is_due=is_due)
            unwritten_part = None if is_due else part
            values |= {**progress_metrics(self.progress, version=version), **self.gauges()}
            if self.evals is not None:
                values |= self.evals.take_val_metrics()
            elapsed = time.monotonic() - started
            values |= {"time/step": elapsed, "perf/throughput": values["progress/tokens"] / elapsed}
            self.telemetry.show_rollouts(step, [rollout for group in groups for rollout in group.rollouts])
            self.telemetry.write_step(step, values)
            step = Step(step + 1)

    async def _hand_over(self, step: Step, groups: list[Group], part: OrchestratorPart, *, is_due: bool) -> dict[str, float]:
        """Pack batch `step`, write its checkpoint part if due, then send the batch. Return the metrics of the batch."""
        times: dict[str, float] = {}
        with timed(times, "parallel_preprocess"):
            batch = await asyncio.to_thread(_make_batch, step, groups, seq_len=self.config.seq_len, has_part=is_due)
        self.progress = RunTotals(
            step=step,
            total_tokens=self.progress.total_tokens + batch.num_tokens,
            total_samples=self.progress.total_samples + batch.num_rollouts,
            total_problems=self.progress.total_problems + len(groups),
        )
        part.progress = self.progress
        if is_due:
            with timed(times, "save_ckpt"):
                await asyncio.to_thread(write_part, self.layout, part, config=self.config, data=self.data)
        if self.before_send is not None:
            with timed(times, "sleep_servers"), process_report.waiting("the servers to free their GPU memory", on="inference"):
                await self.before_send()
        with timed(times, "wait_for_receipt"), process_report.waiting(f"the receipt of batch {step}", on="trainer"):
            await self.sender.send(batch)
        process_report.set_numbers(step=step)
        # A later attempt may have begun meanwhile: then this one must not write over its files.
        await asyncio.to_thread(require_newest_attempt, self.layout, self.config.run)
        written = await asyncio.to_thread(
            write_rollouts, self.layout, step, groups, run_id=self.config.run.id, is_replayable=self.config.record_rollouts
        )
        self.telemetry.write_event(written)
        measured = await asyncio.to_thread(batch_metrics, groups, step=step, num_tokens=batch.num_tokens)
        if self.config.replay is not None:  # the versions are those of another run: no staleness follows from them
            measured = {name: value for name, value in measured.items() if not name.startswith("batch/off_policy_")}
        return times | measured

    async def _send_ending(self, step: Step, part: OrchestratorPart | None) -> None:
        """Send a preemption, or the end of the record, in place of batch `step`. The trainer commits step - 1 and ends.

        Args:
            part: the checkpoint part of step - 1, to be written; None when it is on disk already.
        """
        if part is not None:
            await asyncio.to_thread(write_part, self.layout, part, config=self.config, data=self.data)
        if self.is_exhausted:
            logger.warning("the run ends after step %s: %s", step - 1, self.sampler.explain_drained())
        else:
            logger.info("preempted after batch=%s commits=%s", step - 1, part is not None)
        with process_report.waiting(f"the end of step {step - 1}", on="trainer"):
            purpose = BatchPurpose.END if self.is_exhausted else BatchPurpose.PREEMPT
            await self.sender.send(Batch(step=step, purpose=purpose, has_orchestrator_part=part is not None))

    def _begin(self, step: Step) -> None:
        """Make `step` the batch being filled, for every part of the loop."""
        process_report.begin(f"filling batch {step}")
        self.dispatcher.step = self.watcher.step = step
        self.sampler.begin_step(step)
        self.dispatcher.changed.notify()

    async def _fill(self, step: Step) -> list[Group] | None:
        """Return the groups of batch `step`; None when the run is preempted instead, or a replay has too few groups left."""
        num_groups = self.config.batch_size // self.config.rollouts_per_example
        limit = self.config.max_fruitless_batches * num_groups
        since = time.monotonic()
        if self.preempt_requested:
            return None
        groups = self.buffer.take_batch(step, num_groups=num_groups)  # also drops groups too stale for this step
        while groups is None:
            if self.buffer.fruitless_in_a_row >= limit:
                raise BatchError(
                    f"batch {step} cannot be filled: {self.buffer.fruitless_in_a_row} groups in a row failed or carried no "
                    f"signal; the first: {self.buffer.first_failure}. See logs/orchestrator.stdout; if rewards are all equal, "
                    "check the reward function, raise sampling.temperature or rollouts_per_example, or take easier examples"
                )
            if self.sampler.is_drained and not self.buffer.num_in_flight and not self.dispatcher.undispatched_draws:
                if isinstance(self.sampler, ReplaySource) and step > 1:
                    self.is_exhausted = True
                    return None
                raise BatchError(
                    f"batch {step} cannot be filled, {self.buffer.num_ready} of {num_groups} groups are ready: "
                    + self.sampler.explain_drained()
                )
            if not await self.fill_changed.wait(_SLOW_FILL_S):
                logger.warning(
                    "batch %s is not filled after %.0f s: ready=%s in_flight=%s of %s groups needed; policy held %s",
                    step,
                    time.monotonic() - since,
                    self.buffer.num_ready,
                    self.buffer.num_in_flight,
                    num_groups,
                    self.watcher.version,
                )
            if self.preempt_requested:
                return None
            if self.buffer.num_ready >= num_groups:
                groups = self.buffer.take_batch(step, num_groups=num_groups)
        return groups


def _make_batch(step: Step, groups: list[Group], *, seq_len: int, has_part: bool) -> Batch:
    items = [
        PackItem(sample=sample, advantage=rollout.advantage)
        for group in groups
        for rollout in group.rollouts
        for sample in rollout.samples
    ]
    return Batch(
        step=step,
        purpose=BatchPurpose.TRAIN,
        micro_batches=pack(items, seq_len=seq_len),
        group_ids=[group.group_id for group in groups],
        num_rollouts=sum(len(group.rollouts) for group in groups),
        has_orchestrator_part=has_part,
    )
