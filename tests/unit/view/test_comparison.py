"""Compare two runs on the same examples: which policies are paired, and what the interval covers."""

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from support.evaluations import write_evaluation
from support.histories import write_events
from trivet.cli.main import main
from trivet.config.layout import RunLayout
from trivet.view.comparison import BUDGETS, MeasuredRun, compare_runs
from trivet.wire.events import AnyEvent, BatchFormed, Dispatch, Filter, Finish, Start
from trivet.wire.versions import GroupId, PolicyVersion, Step

GROUP_SIZE = 4


def write_run(root: Path, *, rewards: dict[int, list[float]], num_filtered: int = 0, tokens: float = 10.0) -> RunLayout:
    """Write a run that trains one group a step, and filters `num_filtered` groups before each. A step takes ten seconds."""
    layout, version = RunLayout(root), PolicyVersion(0)
    events: list[AnyEvent] = [Start(role="orchestrator", attempt=1, time=100.0, run_id=root.name, from_step=Step(0))]
    group_id = 0
    for step in range(1, max(rewards) + 1):
        for is_last in [False] * num_filtered + [True]:
            now = {"time": 100.0 + 10 * step, "group_id": GroupId(group_id)}
            events.append(Dispatch(env="spelling", example_id=group_id, version=version, **now))
            events.append(
                Finish(reward_mean=0.5, oldest_version=version, newest_version=version, completion_tokens=tokens, **now)
            )
            if not is_last:
                events.append(Filter(reason="zero_signal", **now))
            group_id += 1
        ids = [GroupId(group_id - 1)]
        events.append(BatchFormed(step=Step(step), group_ids=ids, oldest_version=version, newest_version=version))
    root.mkdir()
    write_events(layout.events, events)
    layout.configs.mkdir()
    (layout.configs / "orchestrator.toml").write_text(f"rollouts_per_example = {GROUP_SIZE}\n")
    layout.metrics.mkdir()
    lines = [{"step": step, "time": 100.0 + 10 * step} for step in range(1, max(rewards) + 1)]
    (layout.metrics / "trainer.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    for step, of_step in rewards.items():
        write_evaluation(root, step=step, rewards=[[reward] for reward in of_step])
    return layout


def compare(capsys, *words: object) -> dict:
    assert main(["compare", *map(str, words), "--json"]) == 0
    (environment,) = json.loads(capsys.readouterr().out)["environments"]
    return environment


def test_runs_are_paired_at_the_largest_cost_that_both_have_reached(tmp_path: Path, capsys) -> None:
    a = write_run(tmp_path / "a", rewards={0: [0, 0, 0], 2: [0.1, 0.2, 0.3], 4: [0.5, 0.5, 0.5]})
    b = write_run(tmp_path / "b", rewards={0: [0, 0, 0], 2: [0.4, 0.2, 0.9], 4: [1, 1, 1]}, num_filtered=1, tokens=5.0)
    found = compare(capsys, a.root, b.root)
    at = {difference["budget"]: difference for difference in found["differences"]}
    # B samples two groups a step, so at 16 rollouts it has trained 2 steps; its tokens are half as many, its seconds equal.
    assert (at["rollouts"]["at"], at["rollouts"]["steps_a"], at["rollouts"]["steps_b"]) == (16, [4], [2])
    assert at["rollouts"]["difference"] == pytest.approx((-0.1 - 0.3 + 0.4) / 3)
    assert at["rollouts"]["share_better"] == pytest.approx(1 / 3)
    assert (at["tokens"]["at"], at["tokens"]["steps_b"]) == (160, [4])
    assert (at["seconds"]["at"], at["seconds"]["steps_a"], at["seconds"]["difference"]) == (40, [4], pytest.approx(0.5))


def test_the_interval_of_one_seed_is_that_of_the_mean_of_paired_differences() -> None:
    rng = np.random.default_rng(0)
    common = rng.normal(0, 5, 300)  # the difficulty of the examples cancels where they are paired
    a, b = common + rng.normal(0, 0.3, 300), common + rng.normal(0.1, 0.3, 300)
    difference = measure([a], [b])
    half = 1.96 * (b - a).std(ddof=1) / np.sqrt(300)
    assert difference.interval == pytest.approx(((b - a).mean() - half, (b - a).mean() + half), abs=0.1 * half)


def test_seeds_that_differ_widen_the_interval() -> None:
    examples = np.zeros(200)
    narrow = measure([examples] * 4, [examples + 0.1] * 4)
    seeds = [-0.3, -0.1, 0.1, 0.3]
    wide = measure([examples + shift for shift in seeds], [examples + 0.1 + shift for shift in seeds])
    assert narrow.interval == pytest.approx((0.1, 0.1))
    assert wide.difference == pytest.approx(0.1)
    half = 1.96 * np.sqrt(2 * np.var(seeds) / 4)  # the bootstrap's variance of a mean of four, once for each side
    assert wide.interval == pytest.approx((0.1 - half, 0.1 + half), rel=0.12)


def measure(side_a: list[np.ndarray], side_b: list[np.ndarray]):
    costs = {0: dict.fromkeys(BUDGETS, 0.0)}
    sides = [
        [
            MeasuredRun(name=str(index), costs=costs, rewards={"e": {0: dict(enumerate(v.tolist()))}}, tasks={"e": {""}})
            for index, v in enumerate(side)
        ]
        for side in (side_a, side_b)
    ]
    (found,) = compare_runs(*sides)
    return found.differences[0]


def test_evaluations_on_other_data_are_refused(tmp_path: Path, capsys) -> None:
    runs = [write_run(tmp_path / name, rewards={0: [0, 1], 1: [1, 1]}) for name in "ab"]
    for layout, digest in zip(runs, ("x", "y"), strict=True):
        for directory in layout.evals.glob("step_*/*"):
            task = {"env": "spelling", "env_id": "spelling", "env_args": {}, "split": "eval", "step": 0, "digest": ""}
            sizes = {"first_example": 0, "num_examples": 2, "rollouts_per_example": 1, "sampling": {"temperature": 1.0}}
            (directory / "task.json").write_text(json.dumps({**task, **sizes, "data_digest": digest}))
    assert main(["compare", *(str(layout.root) for layout in runs)]) == 2
    assert "differ in data, arguments or sampling" in capsys.readouterr().err


def test_the_picture_has_a_panel_for_each_budget_and_a_point_for_each_policy(tmp_path: Path, capsys) -> None:
    runs = [write_run(tmp_path / name, rewards={0: [0, 1], 1: [1, 1], 2: [1, 0]}) for name in ("a<b", "c")]
    file = tmp_path / "out.svg"
    compare(capsys, *(layout.root for layout in runs), "--svg", file)
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.parse(file).iter()]
    assert tags.count("polyline") == 6
    assert tags.count("circle") == 18
