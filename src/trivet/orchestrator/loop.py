"""The orchestrator's loop: fill batch n, write its checkpoint half if one is due, send it, go on to n+1.

Consumes finished groups from the buffer. Produces batches for the trainer. Beside it run the dispatcher (fills the buffer)
and the policy watcher (keeps the servers up to date); all three are tasks of one group, so a failure of any ends all.
Waits for: enough groups (rung by the dispatcher), the trainer's acknowledgement (deadline in rollout_transport.timeout_s).
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from trivet.algorithms.packing import PackItem, pack
from trivet.config.layout import RunLayout
from trivet.config.orchestrator import OrchestratorConfig
from trivet.errors import BatchError
from trivet.orchestrator.buffer import GroupBuffer, Tally
from trivet.orchestrator.checkpoint import OrchestratorHalf, Progress, write_half
from trivet.orchestrator.dispatcher import Dispatcher
from trivet.orchestrator.metrics import batch_metrics, flow_metrics, progress_metrics
from trivet.orchestrator.policy import PolicyWatcher
from trivet.orchestrator.rollout_log import write_rollouts
from trivet.orchestrator.sampler import ExampleSampler
from trivet.orchestrator.waker import Waker
from trivet.telemetry.telemetry import Telemetry
from trivet.transport.port import BatchSender
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.rollouts import Group
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

_SLOW_FILL_S = 60.0
"""How often a batch that does not fill is reported."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """One run of the orchestrator, from `progress.step` on."""

    config: OrchestratorConfig
    layout: RunLayout
    progress: Progress
    sizes: dict[str, int]
    sampler: ExampleSampler
    buffer: GroupBuffer
    dispatcher: Dispatcher
    watcher: PolicyWatcher
    sender: BatchSender
    telemetry: Telemetry
    changed: Waker
    """Rung when a group ended."""

    async def run(self) -> None:
        """Until max_steps, or for ever without one."""
        async with asyncio.TaskGroup() as tasks:
            dispatching = tasks.create_task(self.dispatcher.run(), name="dispatcher")
            watching = tasks.create_task(self.watcher.run(), name="policy-watcher")
            await self._run_steps(dispatching)
            dispatching.cancel()
            watching.cancel()

    async def _run_steps(self, dispatching: asyncio.Task[None]) -> None:
        step = Step(self.progress.step + 1)
        while self.config.max_steps is None or step <= self.config.max_steps:
            started = time.monotonic()
            self._begin(step)
            groups = await self._fill(step)
            filled = time.monotonic()
            batch = self._make_batch(step, groups)
            if step == self.config.max_steps:
                dispatching.cancel()
            if batch.has_orchestrator_half:
                await asyncio.to_thread(write_half, self.layout, self._half())
            formed_version = self.watcher.version
            tally, self.buffer.tally = self.buffer.tally, Tally()
            await self.sender.send(batch)
            await asyncio.to_thread(write_rollouts, self.layout, step, groups)
            values = batch_metrics(groups, step=step, num_tokens=batch.num_tokens)
            values |= flow_metrics(
                tally,
                groups,
                version=formed_version,
                step=step,
                num_in_flight=self.buffer.num_in_flight,
                num_ready=self.buffer.num_ready,
            )
            values |= progress_metrics(self.progress, version=formed_version)
            elapsed = time.monotonic() - started
            values |= {
                "time/step": elapsed,
                "time/generate_completions": filled - started,
                "time/update_weights": self.watcher.last_load_s,
                "perf/throughput": batch.num_tokens / elapsed,
                "sampling/temperature": self.config.sampling.temperature,
            }
            self.telemetry.show_rollouts(step, [rollout for group in groups for rollout in group.rollouts])
            self.telemetry.write_step(step, values)
            step = Step(step + 1)

    def _begin(self, step: Step) -> None:
        self.dispatcher.step = self.watcher.step = step
        self.dispatcher.waker.ring()

    async def _fill(self, step: Step) -> list[Group]:
        num_groups = self.config.batch_size // self.config.rollouts_per_example
        limit = self.config.max_fruitless_batches * num_groups
        since = time.monotonic()
        while True:
            groups = self.buffer.take_batch(step, num_groups=num_groups)
            if groups is not None:
                return groups
            if self.buffer.fruitless_in_a_row >= limit:
                raise BatchError(
                    f"batch {step} cannot be filled: {self.buffer.fruitless_in_a_row} groups in a row failed or carried no "
                    f"signal; the last: {self.buffer.last_failure}. See logs/orchestrator.stdout; if rewards are all equal, "
                    "check the reward function, raise sampling.temperature or rollouts_per_example, or take easier examples"
                )
            if not await self.changed.wait(_SLOW_FILL_S):
                logger.warning(
                    "batch %s is not filled after %.0f s: ready=%s in_flight=%s of %s groups needed; policy held %s",
                    step,
                    time.monotonic() - since,
                    self.buffer.num_ready,
                    self.buffer.num_in_flight,
                    num_groups,
                    self.watcher.version,
                )

    def _make_batch(self, step: Step, groups: list[Group]) -> Batch:
        items = [
            PackItem(sample=sample, advantage=rollout.advantage)
            for group in groups
            for rollout in group.rollouts
            for sample in rollout.samples
        ]
        batch = Batch(
            step=step,
            purpose=BatchPurpose.TRAIN,
            micro_batches=pack(items, seq_len=self.config.seq_len),
            group_ids=[group.group_id for group in groups],
            num_rollouts=sum(len(group.rollouts) for group in groups),
            has_orchestrator_half=self._is_checkpoint_due(step),
        )
        self.progress = Progress(
            step=step,
            total_tokens=self.progress.total_tokens + batch.num_tokens,
            total_samples=self.progress.total_samples + batch.num_rollouts,
            total_problems=self.progress.total_problems + len(groups),
        )
        return batch

    def _is_checkpoint_due(self, step: Step) -> bool:
        interval = self.config.ckpt.interval
        return step == self.config.max_steps or (interval is not None and step % interval == 0)

    def _half(self) -> OrchestratorHalf:
        return OrchestratorHalf(
            progress=self.progress,
            next_group_id=self.sampler.next_group_id,
            buffer=self.buffer.snapshot(also_in_flight=self.dispatcher.waiting_again),
            seed=self.config.seed,
            rollouts_per_example=self.config.rollouts_per_example,
            sizes=self.sizes,
        )
