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
from dataclasses import dataclass

import msgspec
import numpy as np

from trivet.algorithms.difficulty import Difficulty, FairTurns, difficulty_of
from trivet.algorithms.rounding import round_down
from trivet.algorithms.seeds import derive_seed
from trivet.config.schema.orchestrator import BufferConfig
from trivet.wire.rollouts import Group
from trivet.wire.versions import GroupId, Step

logger = logging.getLogger(__name__)

_ALL = "*"
"""Name of the row that holds every environment."""


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
    """The position in the examples of one row. A row is every environment, or one of them with `env_ratios`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Rows of one environment's data set by pool."""

    easy: int
    normal: int
    hard: int


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
        self._num_rows = {env: Counter(hashes) for env, hashes in examples.items()}
        self._totals = {env: len(hashes) for env, hashes in examples.items()}
        self._parked: dict[str, dict[str, ParkedExample]] = {env: {} for env in examples}
        """By hash, longest parked first."""
        self._num_parked_rows: Counter[tuple[str, Difficulty]] = Counter()
        self.evicted: Counter[tuple[str, Difficulty]] = Counter()
        """Examples that left the normal pool since the caller last cleared it."""
        fractions = {Difficulty.EASY: rules.easy_fraction, Difficulty.HARD: rules.hard_fraction}
        for env, members in (parked or {}).items():
            known = [example for example in members if example.example_hash in self._num_rows.get(env, ())]
            counts = Counter(example.difficulty for example in known)
            to_return = {difficulty: round_down(counts[difficulty] * share) for difficulty, share in fractions.items()}
            for example in known:
                if to_return[example.difficulty]:
                    to_return[example.difficulty] -= 1
                else:
                    self._add(env, example)

    def is_parked(self, env: str, example_hash: str) -> bool:
        """Return whether the example is passed over."""
        return example_hash in self._parked[env]

    def sizes(self, env: str) -> PoolSizes:
        """Return the rows of each pool of `env`."""
        easy, hard = (self._num_parked_rows[env, difficulty] for difficulty in (Difficulty.EASY, Difficulty.HARD))
        return PoolSizes(easy=easy, hard=hard, normal=self._totals[env] - easy - hard)

    def judge(self, env: str, example_hash: str, *, mean_reward: float, step: Step) -> Difficulty:
        """Put an example where its group's mean reward says; its time in a pool starts anew."""
        rules = self._rules
        difficulty = difficulty_of(mean_reward, easy_threshold=rules.easy_threshold, hard_threshold=rules.hard_threshold)
        was_parked = self._remove(env, example_hash)
        if difficulty is not Difficulty.NORMAL:
            self._add(env, ParkedExample(example_hash=example_hash, difficulty=difficulty, step=step))
            self.evicted[env, difficulty] += not was_parked
        return difficulty

    def release(self, step: Step) -> int:
        """Return examples to normal that were parked `recheck_interval` steps before batch `step`; return how many."""
        interval = self._rules.recheck_interval
        if interval is None:
            return 0
        parked = [(env, example) for env, members in self._parked.items() for example in members.values()]
        due = [(env, example) for env, example in parked if step - example.step >= interval]
        for env, example in due:
            self._remove(env, example.example_hash)
        return len(due)

    def snapshot(self) -> dict[str, list[ParkedExample]]:
        """Return the parked examples by environment, for a checkpoint."""
        return {env: list(members.values()) for env, members in self._parked.items() if members}

    def _add(self, env: str, parked: ParkedExample) -> None:
        self._parked[env][parked.example_hash] = parked
        self._num_parked_rows[env, parked.difficulty] += self._num_rows[env][parked.example_hash]

    def _remove(self, env: str, example_hash: str) -> bool:
        parked = self._parked[env].pop(example_hash, None)
        if parked is None:
            return False
        self._num_parked_rows[env, parked.difficulty] -= self._num_rows[env][example_hash]
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
        self._rows = {
            name: _Row(name, envs, examples, seed=self._seed, state=state.rows.get(name)) for name, envs in members.items()
        }
        self._turns = FairTurns(dict(zip(members, ratios or [1.0], strict=True)), credits=state.credits)
        self._empty: set[str] = set()

    @property
    def is_drained(self) -> bool:
        """No example is left to draw."""
        return not any(self._pools.sizes(env).normal for env in self._examples)

    def begin_step(self, step: Step) -> None:
        """Return parked examples to the normal pool whose time has come."""
        if returned := self._pools.release(step):
            logger.info("examples returned to the normal pool count=%s step=%s", returned, step)

    def take(self, step: Step) -> Draw | None:
        """Return the next group, whose id is never handed out again; None when no example is left.

        Args:
            step: the batch being filled.
        """
        sizes = {env: self._pools.sizes(env) for env in self._examples}
        able = [name for name, row in self._rows.items() if any(sizes[env].normal for env in row.envs)]
        empty = {env for env, size in sizes.items() if not size.normal}
        for env in sorted(empty - self._empty):
            logger.warning("no example is left to draw env=%s easy=%s hard=%s", env, sizes[env].easy, sizes[env].hard)
        self._empty = empty
        if not able:
            return None
        env, example_id = self._rows[self._turns.take(able)].take(self._pools)
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
            rows={name: row.snapshot() for name, row in self._rows.items()},
            credits=dict(self._turns.credits),
            parked=self._pools.snapshot(),
        )

    def metrics(self) -> dict[str, float]:
        """Return passes over the examples, and the sizes of the pools if there are thresholds.

        `progress/epoch`: passes so far of the environment that had the fewest. `pool/*`: shares of examples. `evicted_examples/*`:
        counts since the last call.
        """
        values = {"progress/epoch": min(row.passes for row in self._rows.values())}
        if self._rules.easy_threshold is None and self._rules.hard_threshold is None:
            return values
        sizes = {env: self._pools.sizes(env) for env in self._examples}
        evicted, total = self._pools.evicted.copy(), sum(len(hashes) for hashes in self._examples.values())
        self._pools.evicted.clear()
        for pool in ("easy", "normal", "hard"):
            counts = {env: getattr(size, pool) for env, size in sizes.items()}
            values[f"pool/{pool}"] = sum(counts.values()) / total
            values |= {f"pool/{pool}/{env}": count / len(self._examples[env]) for env, count in counts.items()}
        for difficulty in (pool for pool in Difficulty if pool is not Difficulty.NORMAL):
            values[f"evicted_examples/{difficulty}"] = sum(evicted[env, difficulty] for env in self._examples)
            values |= {f"evicted_examples/{difficulty}/{env}": evicted[env, difficulty] for env in self._examples}
        return values

    def explain_drained(self) -> str:
        """Say where the examples have gone, and what brings them back."""
        rules = self._rules
        sizes = {env: self._pools.sizes(env) for env in self._examples}
        pools = "; ".join(
            f"{env}: {len(self._examples[env])} examples, {size.easy} easy, {size.hard} hard, {size.normal} normal"
            for env, size in sizes.items()
        )
        return (
            f"no example is left in a normal pool ({pools}; easy_threshold {rules.easy_threshold}, hard_threshold"
            f" {rules.hard_threshold}, recheck_interval {rules.recheck_interval}): raise orchestrator.buffer.easy_threshold,"
            " lower hard_threshold, set a shorter recheck_interval, resume with easy_fraction or hard_fraction above 0, or"
            " take other examples"
        )


class _Row:
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
        self._fingerprint = digest.hexdigest()
        self._epoch = self._position = 0
        if state is not None and state.fingerprint == self._fingerprint:
            self._epoch, self._position = state.epoch, state.position
        elif state is not None:
            self._epoch = state.epoch + 1
        self._order = self._permutation()

    def take(self, pools: DifficultyPools) -> tuple[str, int]:
        """The next example that is not parked, by environment and row; there must be one."""
        while True:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            place = int(self._order[self._position])
            self._position += 1
            index = int(np.searchsorted(self._ends, place, side="right"))
            env = self.envs[index]
            example_id = place - (int(self._ends[index - 1]) if index else 0)
            if not pools.is_parked(env, self._examples[env][example_id]):
                return env, example_id

    @property
    def passes(self) -> float:
        """Return the passes over all examples; one that is under way counts in part."""
        return self._epoch + self._position / len(self._order)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    def snapshot(self) -> RowState:
        """Return the state for a checkpoint."""
        return RowState(epoch=self._epoch, position=self._position, fingerprint=self._fingerprint)

    def _permutation(self) -> np.ndarray:
        rng = np.random.Generator(np.random.PCG64(derive_seed(self._seed, *self._path, self._epoch)))
        return rng.permutation(int(self._ends[-1]))
