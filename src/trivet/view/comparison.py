"""Compares two runs, or two sets of runs with different seeds, on the same examples at equal cost. For `trivet compare`.

Both sides were evaluated on the same data. At a budget each run is represented by its newest evaluated policy that cost at most so
much. The difference is B minus A, paired by example; its interval is that of the bootstrap over examples and, with two seeds or
more on a side, over that side's seeds too.

Legend: E examples, S runs of one side.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from trivet.algorithms.resampling import draw_statistics, find_interval
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.evaluation.results import TASK_FILE, TaskRecord
from trivet.history.record import read_lines
from trivet.history.selection import follow_groups
from trivet.storage.durable import DECODE_ERRORS
from trivet.telemetry.metrics import read_metrics
from trivet.view.evaluations import FoundEvaluation, find_evaluations
from trivet.view.rollouts import RolloutFile

BUDGETS = ("rollouts", "tokens", "seconds")


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluated policy of one run."""

    step: int
    costs: dict[str, float]
    """By budget, what the run had spent when it trained the step; a budget that is unknown is left out."""
    mean: float
    """Mean reward over the examples that both sides have."""


class PairedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """B minus A at one budget."""

    budget: str
    at: float
    """The largest cost that every run has reached."""
    steps_a: list[int]
    """The policy of each run of A."""
    steps_b: list[int]
    mean_a: float
    mean_b: float
    difference: float
    interval: tuple[float, float] | None
    """95 % interval of the difference."""
    share_better: float
    """Share of examples on which B is better than A; a tie counts as half."""


class EnvironmentComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison on one environment."""

    env: str
    num_examples: int
    curves_a: list[list[CurvePoint]]
    """The evaluated policies of each run of A, in the order of steps."""
    curves_b: list[list[CurvePoint]]
    differences: list[PairedDifference]
    """For each budget that is known for every run."""
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run with what its policies cost, and their rewards."""

    name: str
    costs: Mapping[int, Mapping[str, float]]
    """By step and budget."""
    rewards: Mapping[str, Mapping[int, Mapping[int, float]]]
    """Mean reward by environment, step and example."""
    tasks: Mapping[str, set[str]]
    """By environment, what identifies data, split and sampling. Rewards of different tasks are not paired."""


def measure_run(layout: RunLayout) -> MeasuredRun:
    """Read a run's evaluations and costs.

    Raises:
        ConfigError: the run has no complete evaluation.
    """
    rewards: dict[str, dict[int, dict[int, float]]] = {}
    tasks: dict[str, set[str]] = {}
    for found in find_evaluations(layout.root):
        if found.summary is not None and not found.fault:
            rewards.setdefault(found.name, {})[found.step] = _read_rewards(found)
            tasks.setdefault(found.name, set()).add(_identify_task(found))
    return MeasuredRun(name=str(layout.root), costs=_measure_costs(layout), rewards=rewards, tasks=tasks)


def _read_rewards(found: FoundEvaluation) -> dict[int, float]:
    by_example: dict[int, list[float]] = {}
    file = RolloutFile(found.results)
    for head in file.heads:
        by_example.setdefault(head.example_id, []).append(head.reward)
    file.close()
    return {example: float(np.mean(values)) for example, values in by_example.items()}


def _identify_task(found: FoundEvaluation) -> str:
    try:
        task = msgspec.json.decode((found.directory / TASK_FILE).read_bytes(), type=TaskRecord)
    except (OSError, *DECODE_ERRORS):
        return ""
    return msgspec.json.encode((task.env_id, task.env_args, task.split, task.sampling, task.data_digest)).decode()


def _measure_costs(layout: RunLayout) -> dict[int, dict[str, float]]:
    """Return by step what the run had spent until then: sampled rollouts and tokens, also those that were dropped, and seconds."""
    costs: dict[int, dict[str, float]] = {0: dict.fromkeys(BUDGETS, 0.0)}
    if not layout.events.exists():
        return costs
    groups, num_ended_at = follow_groups(line.event for line in read_lines(layout.events))
    first = next(iter(read_lines(layout.events)), None)
    try:
        config = tomllib.loads((layout.configs / "orchestrator.toml").read_text(encoding="utf-8"))
        size = int(config["rollouts_per_example"])
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(f"{layout.configs} does not say rollouts_per_example ({exc}); give a run's output_dir") from exc
    for step, num_ended in num_ended_at.items():
        ended = list(islice(groups.values(), num_ended))
        costs[step] = {"rollouts": float(size * num_ended)}
        if all("tokens" in group.values or "reward" not in group.values for group in ended):
            costs[step]["tokens"] = size * sum(group.values.get("tokens", 0.0) for group in ended)
    for row in read_metrics(layout.metrics / "trainer.jsonl").rows:
        if row["step"] in costs and first is not None:
            costs[row["step"]]["seconds"] = row["time"] - first.event.time
    return costs


def compare_runs(side_a: Sequence[MeasuredRun], side_b: Sequence[MeasuredRun]) -> list[EnvironmentComparison]:
    """Compare two sides on every environment on which all runs were evaluated.

    Raises:
        ConfigError: there is no such environment, or the runs were evaluated on different data or with different sampling.
    """
    runs = [*side_a, *side_b]
    shared = sorted(set.intersection(*(set(run.rewards) for run in runs)))
    if not shared:
        listed = "; ".join(f"{run.name}: {', '.join(sorted(run.rewards)) or 'none'}" for run in runs)
        raise ConfigError(f"no environment was evaluated in every run ({listed}); evaluate the runs on the same one")
    return [_compare_environment(env, side_a, side_b) for env in shared]


def _compare_environment(env: str, side_a: Sequence[MeasuredRun], side_b: Sequence[MeasuredRun]) -> EnvironmentComparison:
    runs = [*side_a, *side_b]
    if len(set.union(*(run.tasks[env] for run in runs))) > 1:
        raise ConfigError(
            f"the evaluations on {env} differ in data, arguments or sampling (task.json), so their examples are not the same; "
            "evaluate both runs again with one configuration: uv run eval"
        )
    examples = sorted(set.intersection(*(set(of_step) for run in runs for of_step in run.rewards[env].values())))
    if not examples:
        raise ConfigError(f"no example of {env} was scored under every policy; look at num_failed in the summaries")
    curves = [
        [
            CurvePoint(step=step, costs=dict(run.costs[step]), mean=float(np.mean([rewards[example] for example in examples])))
            for step, rewards in sorted(run.rewards[env].items())
            if step in run.costs
        ]
        for run in runs
    ]
    curves_a, curves_b = curves[: len(side_a)], curves[len(side_a) :]
    differences: list[PairedDifference] = []
    notes: list[str] = []
    for budget in BUDGETS:
        if any(budget not in point.costs for curve in curves for point in curve) or not all(curves):
            notes.append(f"{budget} are unknown for a run: an older version recorded no length of groups, or metrics are gone")
            continue
        at = min(max(point.costs[budget] for point in curve) for curve in curves)
        newest = [max((p for p in curve if p.costs[budget] <= at), key=lambda p: p.step) for curve in curves]
        values = [[run.rewards[env][p.step][example] for example in examples] for run, p in zip(runs, newest, strict=True)]
        steps = [point.step for point in newest]
        split = len(side_a)
        differences.append(
            _difference(budget, at, np.array(values[:split]), np.array(values[split:]), steps[:split], steps[split:])
        )
    if min(len(side_a), len(side_b)) < 2:
        notes.append("one seed on a side: its interval covers the choice of examples, and not what another seed would give")
    return EnvironmentComparison(
        env=env, num_examples=len(examples), curves_a=curves_a, curves_b=curves_b, differences=differences, notes=notes
    )


def _difference(
    budget: str, at: float, a_SE: np.ndarray, b_SE: np.ndarray, steps_a: list[int], steps_b: list[int]
) -> PairedDifference:
    per_example_E = b_SE.mean(axis=0) - a_SE.mean(axis=0)
    rng = np.random.default_rng(1)

    def draw(counts_BE: np.ndarray) -> np.ndarray:
        """Return the difference for drawn examples and, on each side, drawn seeds."""
        sides = [_draw_seeds(values_SE, len(counts_BE), rng) for values_SE in (a_SE, b_SE)]
        return ((sides[1] - sides[0]) * counts_BE).sum(axis=1) / counts_BE.shape[1]

    return PairedDifference(
        budget=budget,
        at=at,
        steps_a=steps_a,
        steps_b=steps_b,
        mean_a=float(a_SE.mean()),
        mean_b=float(b_SE.mean()),
        difference=float(per_example_E.mean()),
        interval=find_interval(draw_statistics(len(per_example_E), draw)) if len(per_example_E) > 1 else None,
        share_better=float(((np.sign(per_example_E) + 1) / 2).mean()),
    )


def _draw_seeds(values_SE: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return for each draw the mean reward of each example over seeds drawn with replacement, [B, E]."""
    num_seeds = len(values_SE)
    return rng.multinomial(num_seeds, np.full(num_seeds, 1.0 / num_seeds), num_draws) @ values_SE / num_seeds


def describe_difference(found: PairedDifference) -> str:
    """Return what the interval says, in words."""
    if found.interval is None:
        return "one example says nothing"
    low, high = found.interval
    if low > 0 or high < 0:
        return "B is better" if low > 0 else "A is better"
    return "no difference is shown"
