"""A real trainer on two ranks gets a batch that is not finite. Every rank ends with exit code 3, and the log names the place.

test_launcher_processes.py tests that the launcher ends with the trainer's code.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from trivet.config.layout import RunLayout
from trivet.launcher.plan import rank_command, rank_environment
from trivet.transport.recording import record_batch
from trivet.weights.catalog import published_versions
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.versions import GroupId, Step

TIMEOUT_S = 300.0


def make_row(num_samples: int) -> MicroBatch:
    """Make samples of 8 tokens, of which all but the first are trained, with a likelihood as under a fresh model of 128
    tokens."""
    length = 8 * num_samples
    positions_T = np.arange(length, dtype=np.int32) % 8
    return MicroBatch(
        token_ids_T=np.arange(length, dtype=np.int32) % 100,
        position_ids_T=positions_T,
        loss_mask_T=positions_T > 0,
        logprobs_T=np.full(length, -np.log(128), dtype=np.float32),
        advantages_T=np.ones(length, dtype=np.float32),
        temperatures_T=np.ones(length, dtype=np.float32),
        sequence_lengths_S=np.full(num_samples, 8, dtype=np.int32),
    )


def test_a_recorded_batch_that_is_not_finite_ends_both_ranks_with_3_and_names_step_row_and_last_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    recorded = RunLayout(tmp_path / "recorded")
    for step in (1, 2):
        rows = [make_row(2), make_row(3)]
        if step == 2:
            rows[1].advantages_T[16:] = np.nan
        batch = Batch(
            step=Step(step),
            purpose=BatchPurpose.TRAIN,
            micro_batches=rows,
            group_ids=[GroupId(step)],
            num_rollouts=5,
        )
        record_batch(recorded, batch)
    flags = {
        "--data.replay": recorded.root,
        "--output-dir": tmp_path / "out",
        "--model.name": tiny_model,
        "--model.compute-dtype": "float32",
        "--device": "cpu",
    }
    arguments = [str(word) for pair in flags.items() for word in pair]
    ended = subprocess.run(
        rank_command(sys.executable, "trivet.trainer.main", arguments, num_ranks=2, is_on_cpu=True),
        env=os.environ | rank_environment(2, num_cpus=2, is_on_cpu=True),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr[-3000:]
    assert "the loss of step 2 is nan (row 1 sample 2: the advantage is nan at 7 of 7 tokens)" in ended.stderr
    assert "Its largest advantage is nan, which comes from the rewards" in ended.stderr
    assert f"the last good weights are {tmp_path / 'out' / 'weights' / 'step_1'}" in ended.stderr
    assert published_versions(RunLayout(tmp_path / "out")) == [1]
