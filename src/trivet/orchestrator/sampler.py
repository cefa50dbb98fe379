"""Chooses the example of the next group: a state machine whose state is in every checkpoint.

Examples of all environments are in one queue, which is shuffled anew each epoch. With `env_ratios` each environment has a queue of
its own, and the queues take turns. The pool of an example is normal, easy or hard. An example in the easy or hard pool is parked:
the sampler skips it for now. Pools identify examples by their hashes, so they survive a data set that changes between two attempts.
Examples with equal hashes count as the same example. A `Draw` stores everything that was chosen for a group, so a group that is
dispatched again has the same example and temperature, whatever has changed since.
The dispatcher calls it, and the loop at the start of a step.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from trivet.algorithms.arithmetic import derive_seed, round_down
from trivet.algorithms.difficulty import Difficulty, WeightedRoundRobin, rate_difficulty
from trivet.config.schema.orchestrator import BufferConfig
from trivet.wire.rollouts import Group
from trivet.wire.versions import GroupId, Step

logger = logging.getLogger(__name__)

_ALL = "*"
"""Name of the queue that holds every environment."""


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was chosen and numbered, to be run."""

    group_id: GroupId
    env: str
    example_id: int
    """Index of the example in the environment's data set."""
    example_hash: str
    """Hash of the example, by which it is found again in a data set that has changed."""
    step: Step
    """The batch that was being filled when the group was drawn. The group is sampled at the temperature of this step."""


class QueueState(msgspec.Struct, kw_only=True):
    """The position of one queue."""

    epoch: int = 0
    position: int = 0
    """Number of examples of the epoch that were drawn or skipped."""
    fingerprint: str = ""
    """Hash of the seed and the examples. If it changes, a new epoch starts."""


class ParkedExample(msgspec.Struct, frozen=True, kw_only=True):
    """An example in the easy or hard pool, which is skipped for now."""

    example_hash: str
    difficulty: Difficulty
    step: Step
    """The batch that was being filled when the example was parked."""


class SamplerState(msgspec.Struct, kw_only=True):
    """The sampler's state in a checkpoint."""

    next_group_id: GroupId = GroupId(0)
    queues: dict[str, QueueState] = {}
    """Position of each queue, by its name: an environment with `env_ratios`, else `*`."""
    credits: dict[str, float] = {}
    """Credit of each queue towards its next turn, by its name: queues take turns by their ratios."""
    parked: dict[str, list[ParkedExample]] = {}
    """Parked examples by environment, longest parked first."""
    replayed_run: str = ""
    """The run whose recorded groups are replayed; empty in a run that samples. `next_group_id` of its groups were replayed."""


class DifficultyPools:
    """Records which examples are parked, and the size of each pool."""

    def __init__(
        self,
        examples: Mapping[str, Sequence[str]],
        *,
        rules: BufferConfig,
        parked: Mapping[str, Sequence[ParkedExample]] | None = None,
    ) -> None:
        """Restore the pools of a checkpoint, or start with every example in the normal pool.

        Args:
            examples: hash of each example, by environment.
            parked: the parked examples of the checkpoint. Of these, `easy_fraction` and `hard_fraction` return to the normal
                pool, longest parked first.
        """
        self._rules = rules
        self._num_records = {env: Counter(hashes) for env, hashes in examples.items()}
        """Number of records with each hash, by environment: equal records are one example."""
        self.sizes = {env: Counter({Difficulty.NORMAL: len(hashes)}) for env, hashes in examples.items()}
        """Number of records in each pool, by environment."""
        self._parked: dict[str, dict[str, ParkedExample]] = {env: {} for env in examples}
        """Parked examples by environment and hash, longest parked first."""
        self.evicted: Counter[tuple[str, Difficulty]] = Counter()
        """Examples that left the normal pool since `ExampleSampler.metrics` last cleared the counts."""
        fractions = {Difficulty.EASY: rules.easy_fraction, Difficulty.HARD: rules.hard_fraction}
        for env, env_parked in (parked or {}).items():
            still_there = [example for example in env_parked if example.example_hash in self._num_records.get(env, ())]
            counts = Counter(example.difficulty for example in still_there)
            to_return = {difficulty: round_down(counts[difficulty] * share) for difficulty, share in fractions.items()}
            for example in still_there:
                if to_return[example.difficulty]:
                    to_return[example.difficulty] -= 1
                else:
                    self._park(env, example)

    def is_parked(self, env: str, example_hash: str) -> bool:
        """Return whether the example is skipped for now."""
        return example_hash in self._parked[env]

    def move(self, env: str, example_hash: str, *, mean_reward: float, step: Step) -> None:
        """Move an example to the pool that its group's mean reward selects. Its time in the pool starts anew."""
        rules = self._rules
        difficulty = rate_difficulty(mean_reward, easy_threshold=rules.easy_threshold, hard_threshold=rules.hard_threshold)
        was_parked = self._unpark(env, example_hash)
        if difficulty is not Difficulty.NORMAL:
            self._park(env, ParkedExample(example_hash=example_hash, difficulty=difficulty, step=step))
            self.evicted[env, difficulty] += not was_parked

    def release(self, step: Step) -> int:
        """Move examples to the normal pool that were parked `recheck_interval` steps before batch `step`; return their number."""
        interval = self._rules.recheck_interval
        if interval is None:
            return 0
        parked = [(env, example) for env, members in self._parked.items() for example in members.values()]
        due = [(env, example.example_hash) for env, example in parked if step - example.step >= interval]
        return sum(self._unpark(env, example_hash) for env, example_hash in due)

    def snapshot(self) -> dict[str, list[ParkedExample]]:
        """Return the parked examples by environment, for a checkpoint."""
        return {env: list(members.values()) for env, members in self._parked.items() if members}

    def _park(self, env: str, example: ParkedExample) -> None:
        self._parked[env][example.example_hash] = example
        num_records = self._num_records[env][example.example_hash]
        self.sizes[env].update({example.difficulty: num_records, Difficulty.NORMAL: -num_records})

    def _unpark(self, env: str, example_hash: str) -> bool:
        """Return an example to the normal pool. Return whether it was parked."""
        example = self._parked[env].pop(example_hash, None)
        if example is None:
            return False
        num_records = self._num_records[env][example_hash]
        self.sizes[env].update({example.difficulty: -num_records, Difficulty.NORMAL: num_records})
        return True


class ExampleSampler:
    """Draws examples in endless shuffled passes."""

    def __init__(
        self,
        examples: Mapping[str, Sequence[str]],
        *,
        seed: int,
        rules: BufferConfig | None = None,
        state: SamplerState | None = None,
    ) -> None:
        """Start at the first example, or continue from `state`.

        Args:
            examples: hash of each example by environment name, at least one example each.
            state: the state in the checkpoint that is resumed.
        """
        self._examples = examples
        self._rules = rules or BufferConfig()
        self._seed = seed if self._rules.seed is None else self._rules.seed
        state = state or SamplerState()
        self.next_group_id = state.next_group_id
        self._pools = DifficultyPools(examples, rules=self._rules, parked=state.parked)
        ratios = self._rules.env_ratios
        envs_by_queue = {_ALL: list(examples)} if ratios is None else {env: [env] for env in examples}
        self._queues = {
            name: _Queue(name, envs, examples, seed=self._seed, state=state.queues.get(name))
            for name, envs in envs_by_queue.items()
        }
        self._round_robin = WeightedRoundRobin(dict(zip(envs_by_queue, ratios or [1.0], strict=True)), credits=state.credits)
        self._exhausted_envs: set[str] = set()
        """Environments without an example in the normal pool, when `take` was last called."""

    @property
    def is_drained(self) -> bool:
        """True when no example is left to draw: none is in the normal pool."""
        return not any(sizes[Difficulty.NORMAL] for sizes in self._pools.sizes.values())

    def begin_step(self, step: Step) -> None:
        """Return examples to the normal pool that were parked `recheck_interval` steps ago."""
        if returned := self._pools.release(step):
            logger.info("examples returned to the normal pool count=%s step=%s", returned, step)

    def take(self, step: Step) -> Draw | None:
        """Return the next group; None when no example is left. The id of the group is never handed out again.

        Args:
            step: the batch being filled.
        """
        sizes = self._pools.sizes
        exhausted_envs = {env for env, size in sizes.items() if not size[Difficulty.NORMAL]}
        for env in sorted(exhausted_envs - self._exhausted_envs):
            counts = sizes[env][Difficulty.EASY], sizes[env][Difficulty.HARD]
            logger.warning("no example is left to draw env=%s easy=%s hard=%s", env, *counts)
        self._exhausted_envs = exhausted_envs
        drawable = [name for name, queue in self._queues.items() if not exhausted_envs.issuperset(queue.envs)]
        if not drawable:
            return None
        env, example_id = self._queues[self._round_robin.choose(drawable)].take(self._pools)
        draw = Draw(
            group_id=self.next_group_id,
            env=env,
            example_id=example_id,
            example_hash=self._examples[env][example_id],
            step=step,
        )
        self.next_group_id = GroupId(self.next_group_id + 1)
        return draw

    def finished(self, group: Group, draw: Draw, *, step: Step) -> None:
        """Move the example of a finished group to the pool that its mean reward selects."""
        self._pools.move(draw.env, draw.example_hash, mean_reward=float(group.rewards.mean()), step=step)

    def preview(self, count: int) -> list[Draw]:
        """Return the first draws that a new run would make. The state of this sampler does not change."""
        fresh = ExampleSampler(self._examples, seed=self._seed, rules=self._rules)
        return [draw for _ in range(count) if (draw := fresh.take(Step(1)))]

    def locate_draws(self, draws: Sequence[Draw]) -> tuple[list[Draw], list[Draw]]:
        """Find the examples of a checkpoint's groups in the present data sets.

        Returns:
            The groups to dispatch again, at the present indices of their examples, and the groups whose example is missing.
        """
        index_by_hash = {
            env: {example_hash: index for index, example_hash in enumerate(hashes)} for env, hashes in self._examples.items()
        }
        located: list[Draw] = []
        missing: list[Draw] = []
        for draw in draws:
            hashes = self._examples.get(draw.env, ())
            if draw.example_id < len(hashes) and hashes[draw.example_id] == draw.example_hash:
                located.append(draw)
            elif (index := index_by_hash.get(draw.env, {}).get(draw.example_hash)) is not None:
                located.append(msgspec.structs.replace(draw, example_id=index))
            else:
                missing.append(draw)
        return located, missing

    def snapshot(self) -> SamplerState:
        """Return the state for a checkpoint."""
        return SamplerState(
            next_group_id=self.next_group_id,
            queues={name: queue.snapshot() for name, queue in self._queues.items()},
            credits=dict(self._round_robin.credits),
            parked=self._pools.snapshot(),
        )

    def metrics(self) -> dict[str, float]:
        """Return the passes over the examples, and the sizes of the pools if there are thresholds.

        `progress/epoch`: passes of the queue that has made the fewest. `pool/*`: shares of examples. `evicted_examples/*`:
        numbers of examples that left the normal pool since the last call.
        """
        values = {"progress/epoch": min(queue.num_passes for queue in self._queues.values())}
        if self._rules.easy_threshold is None and self._rules.hard_threshold is None:
            return values
        evicted, total = self._pools.evicted.copy(), sum(len(hashes) for hashes in self._examples.values())
        self._pools.evicted.clear()
        for pool in Difficulty:
            counts = {env: size[pool] for env, size in self._pools.sizes.items()}
            values[f"pool/{pool}"] = sum(counts.values()) / total
            values |= {f"pool/{pool}/{env}": count / len(self._examples[env]) for env, count in counts.items()}
            if pool is not Difficulty.NORMAL:
                values[f"evicted_examples/{pool}"] = sum(evicted[env, pool] for env in self._examples)
                values |= {f"evicted_examples/{pool}/{env}": evicted[env, pool] for env in self._examples}
        return values

    def explain_drained(self) -> str:
        """Explain in which pools the examples are, and which settings return them to the normal pool."""
        rules = self._rules
        pools = "; ".join(
            f"{env}: {size.total()} examples, "
            + ", ".join(f"{size[pool]} {pool}" for pool in (Difficulty.EASY, Difficulty.HARD, Difficulty.NORMAL))
            for env, size in self._pools.sizes.items()
        )
        return (
            f"no example is left in a normal pool ({pools}; easy_threshold {rules.easy_threshold}, hard_threshold"
            f" {rules.hard_threshold}, recheck_interval {rules.recheck_interval}): raise orchestrator.buffer.easy_threshold,"
            " lower hard_threshold, set a shorter recheck_interval, resume with easy_fraction or hard_fraction above 0, or"
            " take other examples"
        )


class _Queue:
    """Takes the examples of some environments in endless passes, each shuffled anew.

    The examples of all its environments count as one sequence, one environment after the other.
    """

    def __init__(
        self, name: str, envs: Sequence[str], examples: Mapping[str, Sequence[str]], *, seed: int, state: QueueState | None
    ) -> None:
        self.envs = envs
        self._seed_path = ("examples",) if name == _ALL else ("examples", name)
        """Names from which the seed of each epoch's order is derived."""
        self._examples = examples
        self._seed = seed
        self._ends = np.cumsum([len(examples[env]) for env in envs])
        """Where the examples of each environment end in the sequence of all."""
        digest = hashlib.sha256(str(seed).encode())
        for env in envs:
            digest.update(f"\n{env}\n".encode())
            for example_hash in examples[env]:
                digest.update(example_hash.encode())
        fingerprint = digest.hexdigest()
        self._state = QueueState(fingerprint=fingerprint)
        if state is not None and state.fingerprint == fingerprint:
            self._state = msgspec.structs.replace(state)
        elif state is not None:
            self._state.epoch = state.epoch + 1
        self._order = self._permutation()

    def take(self, pools: DifficultyPools) -> tuple[str, int]:
        """Return the next example that is not parked: its environment and its index there. There must be one."""
        state = self._state
        while True:
            if state.position == len(self._order):
                state.epoch, state.position = state.epoch + 1, 0
                self._order = self._permutation()
            sequence_index = int(self._order[state.position])
            state.position += 1
            env_index = int(np.searchsorted(self._ends, sequence_index, side="right"))
            env = self.envs[env_index]
            example_id = sequence_index - (int(self._ends[env_index - 1]) if env_index else 0)
            if not pools.is_parked(env, self._examples[env][example_id]):
                return env, example_id

    @property
    def num_passes(self) -> float:
        """Return the number of passes over all examples. The pass that is under way counts in part."""
        return self._state.epoch + self._state.position / int(self._ends[-1])

    def snapshot(self) -> QueueState:
        """Return the state for a checkpoint."""
        return msgspec.structs.replace(self._state)

    def _permutation(self) -> np.ndarray:
        """Return the order of the examples in the present epoch."""
        rng = np.random.Generator(np.random.PCG64(derive_seed(self._seed, *self._seed_path, self._state.epoch)))
        return rng.permutation(int(self._ends[-1]))
