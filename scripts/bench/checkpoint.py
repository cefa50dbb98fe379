"""What does a checkpoint after every step add to the time of a step?

The state is copied before the next step starts and written, synced and hashed while it computes, so the least it can cost is
one copy of 12 bytes a parameter at memory speed; what it costs beyond that is the cores the writing takes from the training.

    uv run python scripts/bench/checkpoint.py [--model tiny|DIRECTORY] [--tokens 5000] [--steps 6] [--rounds 2]

Trains the same recorded batches without and with `ckpt.interval = 1`, in turns, with `uv run trainer` and `data.replay`: the
real loop, which publishes its weights after every step in both. Medians over the steps of all rounds, the first of each left
out, because there is no write before it; spread is that of the rounds' medians. The last line is one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from trivet.config.layout import RunLayout
from trivet.transport.recording import record_batch
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import Step

_ROOT = Path(__file__).parents[2]
_ROW_TOKENS = 2048
_SAMPLE_TOKENS = 128
_VOCABULARY = 64
"""Tokens that any model knows."""


def make_row(step: int, index: int) -> MicroBatch:
    rng = np.random.default_rng([step, index])
    num_samples = _ROW_TOKENS // _SAMPLE_TOKENS
    lengths_S = np.full(num_samples, _SAMPLE_TOKENS, dtype=np.int32)
    position_ids_T = np.tile(np.arange(_SAMPLE_TOKENS, dtype=np.int32), num_samples)
    return MicroBatch(
        token_ids_T=rng.integers(0, _VOCABULARY, _ROW_TOKENS, dtype=np.int32),
        position_ids_T=position_ids_T,
        loss_mask_T=position_ids_T >= _SAMPLE_TOKENS // 2,
        logprobs_T=np.full(_ROW_TOKENS, -np.log(_VOCABULARY), dtype=np.float32),
        advantages_T=np.repeat(rng.normal(size=num_samples), _SAMPLE_TOKENS).astype(np.float32),
        temperatures_T=np.ones(_ROW_TOKENS, dtype=np.float32),
        sequence_lengths_S=lengths_S,
    )


def record_batches(root: Path, *, steps: int, tokens: int) -> None:
    for step in range(1, steps + 1):
        rows = [make_row(step, index) for index in range(max(1, round(tokens / _ROW_TOKENS)))]
        batch = Batch(
            step=Step(step),
            purpose=BatchPurpose.TRAIN,
            micro_batches=rows,
            group_ids=[GroupId(step)],
            num_rollouts=len(rows) * _ROW_TOKENS // _SAMPLE_TOKENS,
        )
        record_batch(RunLayout(root), batch)


def train(model: Path, replay: Path, output_dir: Path, *flags: str) -> list[dict[str, float]]:
    """Metrics of each step of one run of the trainer."""
    words = ["--model.name", str(model), "--data.replay", str(replay), "--output-dir", str(output_dir), *flags]
    with (output_dir.parent / f"{output_dir.name}.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "trivet.launcher.trainer", *words], stdout=log, stderr=subprocess.STDOUT, check=True
        )
    return [json.loads(line) for line in (RunLayout(output_dir).metrics / "trainer.jsonl").read_text().splitlines()]


def measure(model: Path, scratch: Path, *, steps: int, tokens: int, rounds: int) -> dict[str, object]:
    record_batches(scratch / "recorded", steps=steps, tokens=tokens)
    kinds = {"without": (), "with": ("--ckpt.interval", "1", "--ckpt.keep-last", "1")}
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    medians: dict[str, list[float]] = {kind: [] for kind in kinds}
    num_bytes = 0
    for round_ in range(rounds):
        for kind, flags in kinds.items():
            output_dir = scratch / f"{kind}_{round_}"
            # Without an interval only the last step commits, so its time is left out on that side.
            found = train(model, scratch / "recorded", output_dir, *flags)[1:-1]
            rows[kind] += found
            medians[kind].append(statistics.median(row["time/step"] for row in found))
            halves = RunLayout(output_dir).checkpoint_step(steps).rglob("*.distcp")
            num_bytes = sum(path.stat().st_size for path in halves)
    step_s = {kind: statistics.median(row["time/step"] for row in found) for kind, found in rows.items()}
    return {
        "bench": "checkpoint",
        "overhead": round(step_s["with"] / step_s["without"] - 1, 4),
        "step_s": round(step_s["with"], 3),
        "plain_step_s": round(step_s["without"], 3),
        "copy_s": round(statistics.median(row["time/save_ckpt"] for row in rows["with"]), 3),
        "write_s": round(statistics.median(row["time/write_ckpt"] for row in rows["with"] if "time/write_ckpt" in row), 3),
        "spread_s": {kind: round(max(values) - min(values), 3) for kind, values in medians.items()},
        "bytes": num_bytes,
        "model": model.name,
        "tokens": max(1, round(tokens / _ROW_TOKENS)) * _ROW_TOKENS,
        "steps": steps,
        "rounds": rounds,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as name:
        scratch = Path(name)
        model = scratch / "tiny" if args.model == "tiny" else Path(args.model)
        if args.model == "tiny":
            subprocess.run([sys.executable, _ROOT / "scripts" / "make_tiny_model.py", model], check=True)
        print(json.dumps(measure(model, scratch, steps=args.steps, tokens=args.tokens, rounds=args.rounds)))


if __name__ == "__main__":
    main()
