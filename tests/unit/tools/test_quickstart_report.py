import json

import pytest

from trivet.tools.quickstart_report import report


def evaluation(directory, *, step: int, avg: float, answer: str) -> None:
    place = directory / f"step_{step}" / "reverse-text"
    place.mkdir(parents=True)
    (place / "summary.json").write_text(json.dumps({"step": step, "avg": avg, "pass_at_k": avg}))
    row = {"prompt": [{"content": "abc"}], "completion": [{"content": answer}], "reward": avg}
    (place / "results.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture
def output(tmp_path):
    metrics = tmp_path / "run" / "metrics"
    metrics.mkdir(parents=True)
    rows = [{"step": step, "reward/mean": step / 20} for step in range(20, 0, -1)]
    (metrics / "orchestrator.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, {"step": 0}]))
    evaluation(tmp_path / "run" / "evals", step=20, avg=0.91, answer="cba")
    evaluation(tmp_path / "run" / "evals", step=0, avg=0.42, answer="abc")
    return tmp_path


def test_the_first_and_last_steps_are_averaged_in_the_order_of_steps(output):
    [line] = [line for line in report(output).splitlines() if line.startswith("reward, first")]
    assert line.split()[-2:] == ["0.150", "0.900"]


def test_before_is_the_start_model_and_after_the_last_policy(output):
    text = report(output)
    [line] = [line for line in text.splitlines() if line.startswith("reward on held-out")]
    assert line.split()[-2:] == ["0.420", "0.910"]
    assert text.index("abc        -> abc") < text.index("abc        -> cba")


def test_it_says_where_the_trained_model_lies(output):
    assert str(output / "run" / "weights" / "step_20") in report(output)
