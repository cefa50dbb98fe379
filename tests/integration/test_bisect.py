"""`trivet bisect` on a recorded run of the real trainer, of which one batch is spoilt."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from support.prepared_batches import make_batch, make_config, run_loop
from support.recorded_run import SEQ_LEN, make_groups
from trivet.algorithms.packing import PackItem, pack
from trivet.cli.main import main
from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.trainer.ranks.world import open_world
from trivet.transport.recording import record_batch
from trivet.wire.batches import BatchPurpose

STEPS, SPOILT = 8, 4


def record(layout: RunLayout, model: Path) -> None:
    batches = {0: make_batch(0, [], BatchPurpose.PROBE)}
    for step in range(1, STEPS + 1):
        items = [PackItem(sample=r.samples[0], advantage=r.advantage) for group in make_groups(step) for r in group.rollouts]
        rows = pack(items, seq_len=SEQ_LEN)
        for row in rows:  # ratios near 1, so that no token is masked
            row.logprobs_T[row.loss_mask_T] = np.float32(-4.6)
            row.advantages_T *= 3e4 if step == SPOILT else 1.0
        batches[step] = make_batch(step, rows, BatchPurpose.TRAIN)
        record_batch(layout, batches[step])
    optim = {"type": "sgd", "lr": 1e-3, "momentum": 0.0, "nesterov": False, "max_norm": None}
    config = make_config(model, layout.root, max_steps=STEPS, optim=optim)
    torch.set_num_threads(1)
    with open_world(device="cpu", timeout_s=30) as world:
        run_loop(config, world, lambda: batches)
    layout.configs.mkdir(exist_ok=True)
    (layout.configs / "trainer.toml").write_text(to_toml(config))


def test_the_batch_that_broke_a_metric_is_named_and_its_absence_mends_it(tmp_path: Path, tiny_model: Path, capsys) -> None:
    layout = RunLayout(tmp_path / "run")
    record(layout, tiny_model)
    before = sorted(path.relative_to(layout.root) for path in layout.root.rglob("*"))
    recorded = [json.loads(line) for line in (layout.metrics / "trainer.jsonl").read_text().splitlines()]
    assert main(["bisect", str(layout.root), "--metric", "entropy/mean", "--below", "3.0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for row in recorded[:SPOILT]:  # in this process on one thread, in the replay on several: equal but for rounding
        assert report["values"][str(row["step"])] == pytest.approx(row["entropy/mean"], rel=1e-5)
    assert (report["broken_at"], report["suspect"], report["group_ids"]) == (SPOILT + 1, SPOILT, [SPOILT])
    assert report["broken_without"] is None
    assert sorted(path.relative_to(layout.root) for path in layout.root.rglob("*")) == before
