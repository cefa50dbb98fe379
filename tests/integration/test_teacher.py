"""On-policy distillation with two real servers: the trainer gets what the teacher's own weights say."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.histories import assert_proven
from support.processes import assert_all_gone, descendants_of
from support.rl_run import CONFIG, Run
from trivet.config.layout import RunLayout
from trivet.examples.tiny_model import make_model, make_tokenizer
from trivet.history.check import check_run
from trivet.transport.recording import read_recorded
from trivet.wire.batches import MicroBatch
from trivet.wire.versions import Step

pytestmark = pytest.mark.vllm

TEACHER = """
[trainer.data]
record = true

[trainer.loss]
adv_tau = 0.0
teacher_tau = 1.0

[orchestrator.teacher_model.model]
name = "@TEACHER@"

[teacher_inference]
max_num_seqs = 32
cpu_kv_cache_gib = 0.25

[teacher_inference.model]
dtype = "float32"
enforce_eager = true
"""


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Write a model with other weights and the same tokens."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, hidden_size=128, layers=2, seed=9, tied=True).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_a_run_learns_from_the_log_probabilities_of_its_teacher(
    make_run: Callable[..., Run], tiny_model: Path, teacher: Path
) -> None:
    run = make_run(max_steps=2, template=CONFIG + TEACHER.replace("@TEACHER@", str(teacher)))
    process = run.start()
    run.wait_for(run.layout.recorded_batch(1))
    family = descendants_of(process.pid)
    assert run.await_exit() == 0, run.output[-4000:]

    assert_all_gone(family)
    assert_proven(check_run(run.layout))
    rows = read_recorded(run.layout, Step(1)).micro_batches
    theirs = [logprobs(teacher, row) for row in rows]
    for row, expected in zip(rows, theirs, strict=True):
        assert row.teacher_logprobs_T is not None
        np.testing.assert_allclose(row.teacher_logprobs_T[row.loss_mask_T], expected, atol=2e-4)
    ours = np.concatenate([logprobs(tiny_model, row) for row in rows])
    metrics = read_metrics(run.layout)
    assert metrics[0]["teacher_kl/mean"] == pytest.approx(float((ours - np.concatenate(theirs)).mean()), abs=2e-4)
    assert all(math.isfinite(line["teacher_kl/mean"]) for line in metrics)
    assert len(metrics) == 2


def logprobs(directory: Path, row: MicroBatch) -> np.ndarray:
    """Return the log-probabilities of the row's loss tokens by plain transformers, sample by sample, at temperature 1."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found: list[np.ndarray] = []
    ends = np.cumsum(row.sequence_lengths_S)
    for start, end in zip(ends - row.sequence_lengths_S, ends, strict=True):
        ids = torch.from_numpy(row.token_ids_T[start:end].astype(np.int64))
        with torch.no_grad():
            table = model(ids[None]).logits[0].log_softmax(-1)
        scored = table[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        found.append(scored[row.loss_mask_T[start + 1 : end]])
    return np.concatenate(found)


def read_metrics(layout: RunLayout) -> list[dict[str, float]]:
    return [json.loads(line) for line in (layout.metrics / "trainer.jsonl").read_text().splitlines()]
