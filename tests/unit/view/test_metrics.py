from pathlib import Path

import numpy as np
import pytest

from trivet.config.layout import RunLayout
from trivet.view.metrics import ALWAYS_READ, LOSS, REWARD, MetricFile, RunMetrics, downsample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trainer.jsonl"


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_lines_that_are_appended_are_read_once_and_half_a_line_waits_for_its_end(path: Path):
    append(path, '{"step": 1, "time": 5.0, "loss": 0.5}\n{"step": 2, "time": 6.0, "lo')
    metrics = MetricFile(path.parent, path)
    metrics.refresh(["loss"])
    assert metrics.steps().tolist() == [1]
    append(path, 'ss": 0.25}\n')
    metrics.refresh(["loss"])
    assert metrics.steps().tolist() == [1, 2]
    assert metrics.values("loss").tolist() == [0.5, 0.25]
    assert metrics.values("time").tolist() == [5.0, 6.0]


def test_a_metric_that_is_asked_for_later_is_read_from_the_start(path: Path):
    append(path, '{"step": 1, "a": 1, "b": 10}\n')
    metrics = MetricFile(path.parent, path)
    metrics.refresh(["a"])
    append(path, '{"step": 2, "a": 2, "b": 20}\n')
    metrics.refresh(["b"])
    assert metrics.values("a").tolist() == [1, 2]
    assert metrics.values("b").tolist() == [10, 20]


def test_a_value_that_is_absent_is_left_out_of_the_curve(path: Path):
    append(path, '{"step": 1, "a": 1}\n{"step": 2}\n{"step": 3, "a": 3}\n')
    metrics = MetricFile(path.parent, path)
    metrics.refresh(["a"])
    assert metrics.curve("a", num_points=10).steps == [1, 3]


@pytest.mark.parametrize("damage", ["\x00\x00\n", '{"step": "x"}\n', "[1]\n", '{"step": 3, "a": "text"}\n'])
def test_damaged_lines_are_skipped_and_counted(path: Path, damage: str):
    append(path, '{"step": 1, "a": 1}\n' + damage + '{"step": 2, "a": 2}\n')
    metrics = MetricFile(path.parent, path)
    metrics.refresh(["a"])
    assert metrics.values("a").tolist() == [1, 2]
    assert metrics.num_damaged == 1


def test_a_file_that_a_resume_wrote_anew_is_read_anew(path: Path):
    append(path, '{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n')
    metrics = MetricFile(path.parent, path)
    metrics.refresh(["a"])
    shorter = path.with_name("shorter")
    append(shorter, '{"step": 1, "a": 1}\n')
    shorter.replace(path)
    append(path, '{"step": 2, "a": 7}\n')
    metrics.refresh(["a"])
    assert metrics.values("a").tolist() == [1, 7]


def test_a_file_that_is_not_there_yet_has_no_points(path: Path):
    metrics = MetricFile(path.parent, path)
    metrics.refresh(["a"])
    assert metrics.curve("a", num_points=10).steps == []
    append(path, '{"step": 1, "a": 1}\n')
    metrics.refresh(["a"])
    assert metrics.curve("a", num_points=10).mean == [1.0]


def test_a_short_curve_is_every_step():
    curve = downsample(np.arange(5), np.arange(5) / 3, num_points=5)
    assert curve.steps == [0, 1, 2, 3, 4]
    assert curve.low is None


@pytest.mark.parametrize("num_values", [1001, 1999, 10_000])
def test_a_long_curve_keeps_its_spikes_its_ends_and_its_mean(num_values: int):
    values = np.sin(np.arange(num_values))
    values[num_values // 2] = 50.0
    curve = downsample(np.arange(1, num_values + 1), values, num_points=1000)
    assert len(curve.steps) == 1000
    assert curve.steps[-1] == num_values
    assert curve.high is not None
    assert curve.low is not None
    assert max(curve.high) == 50.0
    # Points are rounded to six digits.
    assert min(curve.low) == pytest.approx(values.min(), rel=1e-5)
    assert all(low <= mean <= high for low, mean, high in zip(curve.low, curve.mean, curve.high, strict=True))


def test_a_zoom_has_the_steps_within(path: Path):
    append(path, "".join(f'{{"step": {step}, "a": {step}}}\n' for step in range(1, 101)))
    metrics = MetricFile(path.parent, path)
    metrics.refresh(["a"])
    assert metrics.curve("a", num_points=10, first=20, last=25).steps == [20, 21, 22, 23, 24, 25]


def test_metrics_that_appear_late_are_listed(path: Path):
    append(path, '{"step": 1, "a": 1}\n' * 50 + '{"step": 2, "a": 1, "b": 2}\n')
    assert MetricFile(path.parent, path).names() == ["a", "b"]


def test_supervised_fine_tuning_is_shown_where_a_trainer_is(tmp_path: Path):
    layout = RunLayout(tmp_path)
    layout.metrics.mkdir()
    append(layout.metrics / "sft.jsonl", '{"step": 1, "loss/mean": 0.5}\n')
    metrics = RunMetrics(layout)
    metrics.refresh(ALWAYS_READ)
    assert metrics.values(LOSS).tolist() == [0.5]
    assert metrics.values(REWARD).tolist() == []
    curve = metrics.curve(LOSS, num_points=10)
    assert curve is not None
    assert curve.mean == [0.5]
