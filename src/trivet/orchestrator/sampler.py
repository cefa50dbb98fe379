"""Chooses the example of the next group: a state machine whose state is in every checkpoint.

Examples of all environments stand in one queue, shuffled anew each epoch; with `env_ratios` each environment has a queue of its
own and the queues take turns. An example that is parked as easy or hard is passed over. It is named by its hash, so that the pools
survive a data set that changes between two attempts; examples with one hash are one. What was drawn is remembered in its `Draw`,
so a group dispatched again is of the same example, sampled at the same temperature, whatever has changed since.
Called by the dispatcher, and by the loop at the start of a step.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from trivet.algorithms.arithmetic import derive_seed, round_down
from trivet.algorithms.difficulty import Difficulty, FairTurns, difficulty_of
from trivet.config.schema.orchestrator import BufferConfig
from trivet.wire.rollouts import Group
from trivet.wire.versions import GroupId, Step

logger = logging.getLogger(__name__)

_ALL = "*"
"""Name of the queue that holds every environment."""


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """A group to be run."""

    group_id: GroupId
    env: str
    example_id: int
    """Row in the environment's data set."""
    example_hash: str
    """Finds the row again in a data set that has changed."""
    step: Step
    """The batch that was being filled when the group first started: its temperature is that step's."""


class RowState(msgspec.Struct, kw_only=True):
    """The position of one queue. A queue has every environment, or one of them with `env_ratios`."""

    epoch: int = 0
    position: int = 0
    """Places of the epoch that are behind."""
    fingerprint: str = ""
    """Hash of the seed and the examples. If it changes, a new epoch starts."""


class ParkedExample(msgspec.Struct, frozen=True, kw_only=True):
    """An example that is easy or hard and passed over for now."""

    example_hash: str
    difficulty: Difficulty
    step: Step
    """The batch being filled when it was parked."""


class SamplerState(msgspec.Struct, kw_only=True):
    """The sampler's state in a checkpoint."""

    next_group_id: GroupId = GroupId(0)
    rows: dict[str, RowState] = {}
    credits: dict[str, float] = {}
    """Credit of each environment towards its next turn: environments take turns by their ratios."""
    parked: dict[str, list[ParkedExample]] = {}
    """By environment, longest parked first."""
    replayed_run: str = ""
    """The run whose recorded groups are replayed, of which `next_group_id` were; empty in a run that samples."""


class DifficultyPools:
    """Keeps which examples are parked."""

    def __init__(
        self,
        examples: Mapping[str, Sequence[str]],
        *,
        rules: BufferConfig,
        parked: Mapping[str, Sequence[ParkedExample]] | None = None,
    ) -> None:
        """Restore the pools of a checkpoint, or start with every example normal.

        Args:
            examples: hash of each row by environment.
            parked: of the checkpoint; its easy and hard fractions return to normal, longest parked first.
        """
        self._rules = rules
        self._rows_of = {env: Counter(hashes) for env, hashes in examples.items()}
        """Rows of each hash: examples with one hash are one."""
        self.sizes = {env: Counter({Difficulty.NORMAL: len(hashes)}) for env, hashes in examples.items()}
        """Rows of each pool, by environment."""
        self._parked: dict[str, dict[str, ParkedExample]] = {env: {} for env in examples}
        """By hash, longest parked first."""
        self.evicted: Counter[tuple[str, Difficulty]] = Counter()
        """Examples that left the normal pool since the caller last cleared it."""
        fractions = {Difficulty.EASY: rules.easy_fraction, Difficulty.HARD: rules.hard_fraction}
        for env, members in (parked or {}).items():
            known = [example for example in members if example.example_hash in self._rows_of.get(env, ())]
            counts = Counter(example.difficulty for example in known)
            to_return = {difficulty: round_down(counts[difficulty] * share) for difficulty, share in fractions.items()}
            for example in known:
                if to_return[example.difficulty]:
                    to_return[example.difficulty] -= 1
                else:
                    self._park(env, example)

    def is_parked(self, env: str, example_hash: str) -> bool:
        """Return whether the example is passed over."""
        return example_hash in self._parked[env]

    def judge(self, env: str, example_hash: str, *, mean_reward: float, step: Step) -> None:
        """Put an example into the pool of its group's mean reward; its time in a pool starts anew."""
        rules = self._rules
        difficulty = difficulty_of(mean_reward, easy_threshold=rules.easy_threshold, hard_threshold=rules.hard_threshold)
        was_parked = self._unpark(env, example_hash)
        if difficulty is not Difficulty.NORMAL:
            self._park(env, ParkedExample(example_hash=example_hash, difficulty=difficulty, step=step))
            self.evicted[env, difficulty] += not was_parked

    def release(self, step: Step) -> int:
        """Return examples to normal that were parked `recheck_interval` steps before batch `step`; return how many."""
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
        num_rows = self._rows_of[env][example.example_hash]
        self.sizes[env].update({example.difficulty: num_rows, Difficulty.NORMAL: -num_rows})

    def _unpark(self, env: str, example_hash: str) -> bool:
        example = self._parked[env].pop(example_hash, None)
        if example is None:
            return False
        num_rows = self._rows_of[env][example_hash]
        self.sizes[env].update({example.difficulty: -num_rows, Difficulty.NORMAL: num_rows})
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
        """Start afresh, or go on where `state` ends.

        Args:
            examples: hash of each row by environment name, at least one row each.
            state: of the checkpoint that is resumed.
        """
        self._examples = examples
        self._rules = rules or BufferConfig()
        self._seed = seed if self._rules.seed is None else self._rules.seed
        state = state or SamplerState()
        self.next_group_id = state.next_group_id
        self._pools = DifficultyPools(examples, rules=self._rules, parked=state.parked)
        ratios = self._rules.env_ratios
        members = {_ALL: list(examples)} if ratios is None else {env: [env] for env in examples}
        self._queues = {
            name: _Queue(name, envs, examples, seed=self._seed, state=state.rows.get(name)) for name, envs in members.items()
        }
        self._turns = FairTurns(dict(zip(members, ratios or [1.0], strict=True)), credits=state.credits)
        self._empty: set[str] = set()

    @property
    def is_drained(self) -> bool:
        """No example is left to draw."""
        return not any(sizes[Difficulty.NORMAL] for sizes in self._pools.sizes.values())

    def begin_step(self, step: Step) -> None:
        """Return parked examples to the normal pool whose time has come."""
        if returned := self._pools.release(step):
            logger.info("examples returned to the normal pool count=%s step=%s", returned, step)

    def take(self, step: Step) -> Draw | None:
        """Return the next group, whose id is never handed out again; None when no example is left.

        Args:
            step: the batch being filled.
        """
        sizes = self._pools.sizes
        able = [name for name, queue in self._queues.items() if any(sizes[env][Difficulty.NORMAL] for env in queue.envs)]
        empty = {env for env, size in sizes.items() if not size[Difficulty.NORMAL]}
        for env in sorted(empty - self._empty):
            counts = sizes[env][Difficulty.EASY], sizes[env][Difficulty.HARD]
            logger.warning("no example is left to draw env=%s easy=%s hard=%s", env, *counts)
        self._empty = empty
        if not able:
            return None
        env, example_id = self._queues[self._turns.take(able)].take(self._pools)
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
        """Move the example of a finished group to the pool that its rewards say."""
        self._pools.judge(draw.env, draw.example_hash, mean_reward=float(group.rewards.mean()), step=step)

    def preview(self, count: int) -> list[Draw]:
        """Return the first draws of a fresh run, without drawing."""
        fresh = ExampleSampler(self._examples, seed=self._seed, rules=self._rules)
        return [draw for _ in range(count) if (draw := fresh.take(Step(1)))]

    def locate_draws(self, draws: Sequence[Draw]) -> tuple[list[Draw], list[Draw]]:
        """Find groups of a checkpoint in today's data sets: return those to dispatch again, and those whose example is gone."""
        rows = {env: {name: row for row, name in enumerate(hashes)} for env, hashes in self._examples.items()}
        found: list[Draw] = []
        gone: list[Draw] = []
        for draw in draws:
            hashes = self._examples.get(draw.env, ())
            if draw.example_id < len(hashes) and hashes[draw.example_id] == draw.example_hash:
                found.append(draw)
            elif (row := rows.get(draw.env, {}).get(draw.example_hash)) is not None:
                found.append(msgspec.structs.replace(draw, example_id=row))
            else:
                gone.append(draw)
        return found, gone

    def snapshot(self) -> SamplerState:
        """Return the state for a checkpoint."""
        return SamplerState(
            next_group_id=self.next_group_id,
            rows={name: queue.snapshot() for name, queue in self._queues.items()},
            credits=dict(self._turns.credits),
            parked=self._pools.snapshot(),
        )

    def metrics(self) -> dict[str, float]:
        """Return passes over the examples, and the sizes of the pools if there are thresholds.

        `progress/epoch`: passes so far of the environment that had the fewest. `pool/*`: shares of examples. `evicted_examples/*`:
        counts since the last call.
        """
        values = {"progress/epoch": min(queue.passes for queue in self._queues.values())}
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
        """Explain where the examples have gone, and what brings them back."""
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
    """The examples of some environments in endless passes, each shuffled anew."""

    def __init__(
        self, name: str, envs: Sequence[str], examples: Mapping[str, Sequence[str]], *, seed: int, state: RowState | None
    ) -> None:
        self.envs = envs
        self._path = ("examples",) if name == _ALL else ("examples", name)
        self._examples = examples
        self._seed = seed
        self._ends = np.cumsum([len(examples[env]) for env in envs])
        digest = hashlib.sha256(str(seed).encode())
        for env in envs:
            digest.update(f"\n{env}\n".encode())
            for example_hash in examples[env]:
                digest.update(example_hash.encode())
        fingerprint = digest.hexdigest()
        self._state = RowState(fingerprint=fingerprint)
        if state is not None and state.fingerprint == fingerprint:
            self._state = msgspec.structs.replace(state)
        elif state is not None:
            self._state.epoch = state.epoch + 1
        self._order = self._permutation()

    def take(self, pools: DifficultyPools) -> tuple[str, int]:
        """Return the next example that is not parked, by environment and row; there must be one."""
        state = self._state
        while True:
            if state.position == len(self._order):
                state.epoch, state.position = state.epoch + 1, 0
                self._order = self._permutation()
            place = int(self._order[state.position])
            state.position += 1
            index = int(np.searchsorted(self._ends, place, side="right"))
            env = self.envs[index]
            example_id = place - (int(self._ends[index - 1]) if index else 0)
            if not pools.is_parked(env, self._examples[env][example_id]):
                return env, example_id

    @property
    def passes(self) -> float:
        """Return the passes over all examples; one that is under way counts in part."""
        return self._state.epoch + self._state.position / int(self._ends[-1])

    def snapshot(self) -> RowState:
        """Return the state for a checkpoint."""
        return msgspec.structs.replace(self._state)

    def _permutation(self) -> np.ndarray:
        rng = np.random.Generator(np.random.PCG64(derive_seed(self._seed, *self._path, self._state.epoch)))
        return rng.permutation(int(self._ends[-1]))
