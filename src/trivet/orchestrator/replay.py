"""Replays the rollouts that another run recorded, instead of sampling (`orchestrator.replay`). Used by the loop.

    rollouts/step_N/groups.msgpack.z --group--> ReplaySource --advantages--> GroupBuffer --batch n--> Loop

Each group is replayed once, in the order in which the recorded run trained on it. Groups get ids of this run, from 0. So the id of
the next group, which is in every checkpoint, is also the position in the record.

A policy version in a replayed rollout names a policy of the recorded run and never one of this run. The recorded
log-probabilities are those of that policy, so the loss corrects for the difference as for any off-policy token. No limit on
staleness applies.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from trivet.algorithms.advantages import AdvantageFunction
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import CheckpointError
from trivet.orchestrator.buffer import GroupBuffer
from trivet.orchestrator.dispatcher import ChangeEvent, make_group
from trivet.orchestrator.sampler import Draw, SamplerState
from trivet.transport.recording import read_groups, recorded_files
from trivet.wire.rollouts import Group
from trivet.wire.versions import GroupId, PolicyVersion, Step

UNLIMITED_STEPS = 1 << 62
"""Limit on the staleness of replayed groups. No group reaches it: their versions cannot be compared with this run's steps."""
_IDLE_WAIT_S = 60.0
"""The source checks again at least this often, so that a missed notification costs a minute and not the run."""


class ReplaySource:
    """Hands recorded groups to the buffer. It stands in for the sampler and the dispatcher of a run that samples."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        buffer: GroupBuffer,
        advantage: AdvantageFunction,
        on_group_end: Callable[[], None],
        state: SamplerState,
    ) -> None:
        """Start with the first group recorded in `config.replay`, or continue from `state`.

        Args:
            on_group_end: called after every group, and when the buffer has enough groups or the record has ended.
            state: the state in the checkpoint that is resumed; that of a new run has `next_group_id` 0.
        """
        assert config.replay is not None
        self._config = config
        self._directory = config.replay
        self._buffer = buffer
        self._advantage = advantage
        self._on_group_end = on_group_end
        self._files = deque(recorded_files(self._directory))
        self._groups = deque[Group]()
        self._num_to_skip = self.next_group_id = state.next_group_id
        self.run_id = read_groups(self._files[0]).run_id
        """The run that sampled the groups."""
        if state.replayed_run not in ("", self.run_id):
            raise CheckpointError(
                f"the checkpoint was made by a replay of run {state.replayed_run!r}, and orchestrator.replay ({self._directory}) "
                f"holds run {self.run_id!r}; give the directory of the first"
            )
        self.changed = ChangeEvent()
        self.step = Step(1)
        """The batch being filled."""
        self.undispatched_draws: Sequence[Draw] = ()
        """Always empty: a group is read and finished without an await in between, so none is in flight in a checkpoint."""

    @property
    def is_drained(self) -> bool:
        """True when every recorded group was given to the buffer."""
        return not self._files and not self._groups

    async def run(self) -> None:
        """Give groups to the buffer whenever it has too few for the next batch, until cancelled."""
        groups_per_batch = self._config.batch_size // self._config.rollouts_per_example
        while True:
            while self._buffer.num_ready < groups_per_batch and not self.is_drained:
                if not self._groups:
                    recorded = await asyncio.to_thread(read_groups, self._files[0])
                    self._groups.extend(recorded.groups)
                    self._files.popleft()  # not earlier: `is_drained` must be False while the last file is read
                elif self._num_to_skip:
                    self._groups.popleft()
                    self._num_to_skip -= 1
                else:
                    self._replay(self._groups.popleft())
                    await asyncio.sleep(0)
            self._on_group_end()
            await self.changed.wait(_IDLE_WAIT_S)

    def begin_step(self, step: Step) -> None:
        """Do nothing: examples come in the record's order, and none is parked."""

    def snapshot(self) -> SamplerState:
        """Return the state for a checkpoint."""
        return SamplerState(next_group_id=self.next_group_id, replayed_run=self.run_id)

    def metrics(self) -> dict[str, float]:
        """Return the number of groups replayed so far."""
        return {"progress/replayed_groups": float(self.next_group_id)}

    def explain_drained(self) -> str:
        """Explain that the record has ended."""
        return f"the record in {self._directory} is used up after {self.next_group_id} groups"

    def _replay(self, recorded: Group) -> None:
        """Report a group to the buffer as dispatched and then as finished. No await, so no checkpoint is made in between."""
        group_id, env, example_id = self.next_group_id, recorded.env, recorded.example_id
        draw = Draw(group_id=group_id, env=env, example_id=example_id, example_hash="", step=self.step)
        self.next_group_id = GroupId(group_id + 1)
        self._buffer.dispatched(draw, version=recorded.oldest_version)
        for sample in (sample for rollout in recorded.rollouts for sample in rollout.samples):
            if sample.masked is not None:  # undo the filters of the recorded run: this run has filters of its own
                sample.loss_mask_T, sample.logprobs_T = sample.masked.loss_mask_T, sample.masked.logprobs_T
                sample.masked = None
        self._buffer.finished(make_group(draw, recorded.rollouts, config=self._config, advantage=self._advantage))
        self._on_group_end()


class UnservedPolicy:
    """Takes the place of the policy watcher in a replay, where no server loads policies."""

    last_load_s = 0.0

    def __init__(self) -> None:
        self.step = Step(1)
        """The batch being filled."""

    @property
    def version(self) -> PolicyVersion:
        """The newest policy that the batch being filled can be trained on."""
        return PolicyVersion(self.step - 1)

    async def run(self) -> None:
        """Wait until cancelled: no policy is loaded."""
        await asyncio.Event().wait()
