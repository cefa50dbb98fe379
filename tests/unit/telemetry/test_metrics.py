import json
import math

import numpy as np
import pytest

from trivet.telemetry.console import step_line
from trivet.telemetry.metrics import MetricsWriter, read_metrics, summarize


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_in_the_file_at_once_and_what_does_not_exist_is_absent(tmp_path):
    path = tmp_path / "metrics" / "trainer.jsonl"
    writer = MetricsWriter(path, clock=lambda: 5.5)
    writer.write(1, {"loss/mean": 0.25, "entropy/mean": math.nan, "optim/grad_norm": math.inf, "count": np.float32(2)})
    assert read(path) == [{"step": 1, "time": 5.5, "loss/mean": 0.25, "count": 2.0}]
    writer.close()


def test_a_resumed_run_has_one_line_per_step(tmp_path):
    path = tmp_path / "trainer.jsonl"
    for resume_step, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        writer = MetricsWriter(path, resume_step=resume_step)
        for step in steps:
            writer.write(step, {"from": resume_step})
        writer.close()
    assert [(line["step"], line["from"]) for line in read(path)] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]


@pytest.mark.parametrize("resume_step", [2, 0])
def test_a_resumed_run_drops_a_line_cut_short_by_a_crash_and_a_fresh_one_starts_a_new_history(tmp_path, resume_step):
    path = tmp_path / "trainer.jsonl"
    path.write_text('{"step": 1, "time": 0}\n{"step": 2, "ti')
    MetricsWriter(path, resume_step=resume_step).close()
    assert [line["step"] for line in read(path)] == ([1] if resume_step else [])


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"{", b"[1]", b'{"time": 1}', b'{"step": "1"}', b'{"step": true}', b"[" * 100_000, b'{"step": 1         '],
)
def test_a_damaged_line_is_skipped_counted_and_said_once_on_resume(tmp_path, caplog, line):
    path = tmp_path / "trainer.jsonl"
    assert read_metrics(path).rows == []
    path.write_bytes(b'{"step": 1, "time": 0}\n' + line + b'\n{"step": 2, "time": 0}\n{"step": 3, "time": 0}\n')
    found = read_metrics(path)
    assert ([row["step"] for row in found.rows], found.num_damaged) == ([1, 2, 3], 1)
    for _ in range(2):
        MetricsWriter(path, resume_step=2).close()
    assert [row["step"] for row in read(path)] == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [f"removed damaged lines from {path}: lines=1"]


def test_five_numbers_of_an_array():
    assert summarize("loss", np.array([[1, 2], [3, 10]], dtype=np.int32)) == {
        "loss/mean": 4.0,
        "loss/median": 2.5,
        "loss/std": pytest.approx(math.sqrt(12.5)),
        "loss/min": 1.0,
        "loss/max": 10.0,
    }
    assert summarize("loss", np.array([])) == {}
    assert all(math.isnan(value) for value in summarize("loss", np.array([1.0, math.nan])).values())


TRAINER = {"time/step": 1.99, "loss/mean": 0.0123, "entropy/mean": 0.5432, "mismatch_kl/mean": 0.0011, "something/else": 1.0}
TRAINER |= {"optim/grad_norm": 0.1234, "optim/lr": 3e-6, "perf/throughput": 11896.0, "perf/mfu": 11.1, "perf/peak_memory": 12.5}
ORCHESTRATOR = {"time/step": 73.77, "reward/mean": 0.3887, "perf/throughput": 2408.9, "seq_len/mean": 345.6}
ORCHESTRATOR |= {"batch/async_level": 1.0, "batch/off_policy_level/max": 0.0}


@pytest.mark.parametrize(
    ("role", "values", "line"),
    [
        (
            "trainer",
            TRAINER,
            "Step 7 | Time: 1.99s | Loss: 0.0123 | Entropy: 0.5432 | Mismatch KL: 0.0011 | Grad. Norm: 0.1234 | LR: 3.00e-06 | "
            "Throughput: 11896 tokens/s | MFU: 11.1% | Peak Mem.: 12.5 GiB",
        ),
        (
            "orchestrator",
            {**ORCHESTRATOR, "val_reward/mean": 0.5},
            "Step 7 | Time: 73.77s | Reward: 0.3887 | Val. Reward: 0.5000 | Throughput: 2408.9 tokens/s | "
            "Seq. Length: 345.6 tokens/sample | Async Level: 1 | Max. Off-Policy Level: 0",
        ),
        ("trainer", {"time/step": 2.0, "loss/mean": math.nan, "optim/lr": 1e-3}, "Step 7 | Time: 2.00s | LR: 1.00e-03"),
    ],
)
def test_a_step_line_has_the_references_form_without_the_parts_that_have_no_value(role, values, line):
    assert step_line(role, 7, values) == line
