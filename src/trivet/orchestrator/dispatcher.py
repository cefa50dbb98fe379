"""Keeps groups in flight: decides when one may start, runs it, and hands the result to the buffer.

Consumes draws of the sampler. Produces finished groups in the buffer. Waits on its waker, rung when a group ends, a batch is
formed or a policy is loaded. Each group is a task of its own; its failure costs that group only.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trivet.algorithms.advantages import AdvantageFunction
from trivet.algorithms.packing import truncate
from trivet.algorithms.staleness import may_dispatch
from trivet.config.orchestrator import OrchestratorConfig
from trivet.environments.port import EnvironmentPool
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.sampler import Draw, ExampleSampler
from trivet.orchestrator.waker import Waker
from trivet.wire.groups import GroupRequest, SamplingArguments
from trivet.wire.rollouts import Group, GroupId, Rollout
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 5.0
"""The dispatcher looks again at least this often, so that a missed ring costs seconds and not the run."""


class RunGroup(Protocol):
    """Runs the group of `draw` and returns its scored rollouts."""

    async def __call__(self, draw: Draw) -> list[Rollout]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    rollouts_per_example: int
    rollouts_per_step: int
    """floor(batch_size * oversampling_factor)."""
    max_rollouts_in_flight: int
    max_async_level: int
    seq_len: int
    """Longer samples are cut."""

    @classmethod
    def of(cls, config: OrchestratorConfig) -> "Limits":
        per_step = int(config.batch_size * config.oversampling_factor)
        return cls(
            rollouts_per_example=config.rollouts_per_example,
            rollouts_per_step=per_step,
            max_rollouts_in_flight=min(per_step, config.max_concurrent or per_step),
            max_async_level=config.max_async_level,
            seq_len=config.seq_len,
        )


class Dispatcher:
    def __init__(
        self,
        *,
        sampler: ExampleSampler,
        buffer: GroupBuffer,
        run_group: RunGroup,
        advantage: AdvantageFunction,
        limits: Limits,
        on_change: Callable[[], None],
        again: Sequence[GroupId] = (),
    ) -> None:
        """
        Args:
            on_change: called after every group that ended.
            again: groups that were in flight when the checkpoint was made; they start first, under their old ids.
        """
        self._sampler = sampler
        self._buffer = buffer
        self._run_group = run_group
        self._advantage = advantage
        self._limits = limits
        self._on_change = on_change
        self._again = list(again)
        self._tasks: dict[GroupId, asyncio.Task[None]] = {}
        self.waker = Waker()
        self.step = Step(1)
        """The batch being filled."""
        self.version = PolicyVersion(0)
        """What the servers hold."""

    @property
    def waiting_again(self) -> list[GroupId]:
        """Groups of the checkpoint that were not started again yet: still owed, and part of the next checkpoint."""
        return list(self._again)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._cancel_stale()
                while self._may_start():
                    draw = self._sampler.draw(self._again.pop(0)) if self._again else self._sampler.take()
                    self._buffer.dispatched(draw, version=self.version)
                    self._tasks[draw.group_id] = tasks.create_task(self._run(draw), name=f"group-{draw.group_id}")
                await self.waker.wait(_IDLE_WAIT_S)

    def _may_start(self) -> bool:
        limits = self._limits
        in_flight = self._buffer.num_in_flight * limits.rollouts_per_example
        if in_flight + limits.rollouts_per_example > limits.max_rollouts_in_flight:
            return False
        return may_dispatch(
            step=self.step,
            version=self.version,
            rollouts_ahead=in_flight + self._buffer.num_ready * limits.rollouts_per_example,
            rollouts_per_step=limits.rollouts_per_step,
            max_async_level=limits.max_async_level,
        )

    def _cancel_stale(self) -> None:
        for group_id in self._buffer.stale_in_flight(self.step):
            self._tasks.pop(group_id).cancel()
            self._buffer.cancelled(group_id, "stale")

    async def _run(self, draw: Draw) -> None:
        try:
            rollouts = await self._run_group(draw)
        except Exception as exc:  # noqa: BLE001  an environment is the user's code: what it raises costs this group only
            logger.warning("group failed group=%s env=%s: %s", draw.group_id, draw.env, exc)
            rollouts, error = [], f"{type(exc).__name__}: {exc}"
        else:
            error = ""
        if self._tasks.pop(draw.group_id, None) is None:
            return  # cancelled meanwhile, and accounted for
        if error:
            self._buffer.failed(draw.group_id, error)
        else:
            self._buffer.finished(self._make_group(draw, rollouts))
        self.waker.ring()
        self._on_change()

    def _make_group(self, draw: Draw, rollouts: list[Rollout]) -> Group:
        group = Group(group_id=draw.group_id, env=draw.env, example_id=draw.example_id, rollouts=rollouts)
        for rollout, advantage in zip(rollouts, self._advantage(group.rewards), strict=True):
            rollout.advantage = float(advantage)
            rollout.samples = [truncate(sample, seq_len=self._limits.seq_len) for sample in rollout.samples]
        return group


def group_runner(
    pool: EnvironmentPool,
    base_urls: Sequence[str],
    *,
    sampling_of: Callable[[Draw], SamplingArguments],
    rollouts_per_example: int,
) -> RunGroup:
    """A `RunGroup` over a pool of environments; a group stays on one server, so that its prompt is computed once.

    Args:
        sampling_of: asked when the group starts.
    """

    async def run(draw: Draw) -> list[Rollout]:
        return await pool.run_group(
            GroupRequest(
                group_id=draw.group_id,
                env=draw.env,
                example_id=draw.example_id,
                num_rollouts=rollouts_per_example,
                base_url=base_urls[draw.group_id % len(base_urls)],
                sampling=sampling_of(draw),
            )
        )

    return run
