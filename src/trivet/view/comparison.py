"""Compares two runs, or two sets of runs with different seeds, on the same examples at equal cost. For `trivet compare`.

Both sides were evaluated on the same data. At a budget each run is represented by its newest evaluated policy that cost at most so
much. The difference is B minus A, paired by example; its interval is that of the bootstrap over examples and, with two seeds or
more on a side, over that side's seeds too.

Legend: E examples, S runs of one side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from trivet.algorithms.resampling import find_interval
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.evaluation.results import TASK_FILE, TaskRecord
from trivet.history.record import read_lines
from trivet.history.selection import follow_groups
from trivet.storage.durable import DECODE_ERRORS
from trivet.telemetry.metrics import read_metrics
from trivet.view.evaluations import FoundEvaluation, find_evaluations
from trivet.view.rollouts import RolloutFile
from trivet.view.run import read_config

BUDGETS = ("rollouts", "tokens", "seconds")


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluated policy of one run."""

    step: int
    costs: dict[str, float]
    """By budget, what the run had spent when it trained the step."""
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
    interval: tuple[float, float]
    """95 % interval of the difference."""
    share_better: float
    """Share of examples on which B is better than A; a tie counts as half."""
    verdict: str
    """What the interval says, in words."""


class EnvironmentComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison on one environment."""

    env: str
    num_examples: int
    curves_a: list[list[CurvePoint]]
    """The evaluated policies of each run of A, in the order of steps."""
    curves_b: list[list[CurvePoint]]
    differences: list[PairedDifference]


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
        ConfigError: the run has no evaluation, or no configuration.
    """
    rewards: dict[str, dict[int, dict[int, float]]] = {}
    tasks: dict[str, set[str]] = {}
    for found in find_evaluations(layout.root):
        if found.summary is not None:
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
    if not layout.events.exists():  # the directory of `uv run eval`
        return costs
    try:
        size = int(read_config(layout, "orchestrator")["rollouts_per_example"])
    except (ValueError, KeyError) as exc:
        raise ConfigError(f"{layout.configs} does not say rollouts_per_example ({exc}); give a run's output_dir") from exc
    events = [line.event for line in read_lines(layout.events)]
    groups, num_ended_at = follow_groups(events)
    num_tokens = np.cumsum([0.0, *(size * group.values.get("tokens", 0.0) for group in groups.values())])
    ended_at = {row["step"]: row["time"] - events[0].time for row in read_metrics(layout.metrics / "trainer.jsonl").rows}
    for step in num_ended_at.keys() & ended_at.keys():
        num_ended = num_ended_at[step]
        spent = (float(size * num_ended), float(num_tokens[num_ended]), ended_at[step])
        costs[step] = dict(zip(BUDGETS, spent, strict=True))
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
    return [_compare_environment(env, runs, num_a=len(side_a)) for env in shared]


def _compare_environment(env: str, runs: Sequence[MeasuredRun], *, num_a: int) -> EnvironmentComparison:
    """Compare the first `num_a` runs with the others."""
    if len(set.union(*(run.tasks[env] for run in runs))) > 1:
        raise ConfigError(
            f"the evaluations on {env} differ in data, arguments or sampling (task.json), so their examples are not the same; "
            "evaluate both runs again with one configuration: uv run eval"
        )
    examples = sorted(set.intersection(*(set(of_step) for run in runs for of_step in run.rewards[env].values())))
    curves = [
        [
            CurvePoint(step=step, costs=dict(run.costs[step]), mean=float(np.mean([rewards[example] for example in examples])))
            for step, rewards in sorted(run.rewards[env].items())
            if step in run.costs
        ]
        for run in runs
    ]
    if len(examples) < 2 or not all(curves):
        raise ConfigError(
            f"{env}: {len(examples)} examples were scored under every policy, and a run without an evaluated step of its own "
            "has no costs; evaluate each run on at least two examples, and look at num_failed in the summaries"
        )
    differences: list[PairedDifference] = []
    for budget in BUDGETS:
        at = min(max(point.costs[budget] for point in curve) for curve in curves)
        steps = [max(point.step for point in curve if point.costs[budget] <= at) for curve in curves]
        values_SE = np.array(
            [[run.rewards[env][step][example] for example in examples] for run, step in zip(runs, steps, strict=True)]
        )
        differences.append(_find_difference(budget, at, values_SE, steps, num_a=num_a))
    return EnvironmentComparison(
        env=env, num_examples=len(examples), curves_a=curves[:num_a], curves_b=curves[num_a:], differences=differences
    )


def _find_difference(budget: str, at: float, values_SE: np.ndarray, steps: list[int], *, num_a: int) -> PairedDifference:
    a_SE, b_SE = values_SE[:num_a], values_SE[num_a:]
    per_example_E = b_SE.mean(axis=0) - a_SE.mean(axis=0)
    rng = np.random.default_rng(1)

    def draw(counts_E: np.ndarray) -> np.ndarray:
        """Return the difference for drawn examples and, on each side, drawn seeds."""
        drawn_a, drawn_b = (rng.choice(side_SE, len(side_SE)).mean(axis=0) for side_SE in (a_SE, b_SE))
        return (drawn_b - drawn_a) @ counts_E / len(counts_E)

    low, high = find_interval(len(per_example_E), draw).tolist()
    return PairedDifference(
        budget=budget,
        at=at,
        steps_a=steps[:num_a],
        steps_b=steps[num_a:],
        mean_a=float(a_SE.mean()),
        mean_b=float(b_SE.mean()),
        difference=float(per_example_E.mean()),
        interval=(low, high),
        share_better=float(((np.sign(per_example_E) + 1) / 2).mean()),
        verdict="B is better" if low > 0 else "A is better" if high < 0 else "no difference is shown",
    )
