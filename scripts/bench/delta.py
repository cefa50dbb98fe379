"""How much smaller is a policy's delta than the policy, and how many seconds does it take to write and to apply?

For each case a model takes steps on real text with the trainer's own model, default loss and AdamW. The policy of each step is
published as the trainer does, in bfloat16 and in float32, with its delta, and the delta is applied to a copy of the policy before.
Log-probabilities are the model's own, as if it had sampled the text; advantages are random, as at the start of a run. What counts
is the update. The model computes in bfloat16, over float32 master weights.

    uv run python scripts/bench/delta.py [--smollm2 models/smollm2] [--steps 5] [--tokens 1024] [--cases NAME ...]
        [--dtypes bfloat16 float32]

The floor of a bfloat16 delta is the entropy of which values changed, plus one bit for the direction of each change: 0.6 % of the
policy's bytes at 1 % changed. Bars: at most 5 % there, and less time to apply than the whole policy takes at 1 Gbit/s. Times whose
name has `cpu` are of all threads, for machines that do other work meanwhile. Deltas above the share at which a run gives them up
are written too. Medians over the steps after the first, whose update is Adam's largest; the last line is one JSON object.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from trivet.algorithms.packing import PackItem, pack
from trivet.config.layout import RunLayout
from trivet.config.schema.losses import DefaultLossConfig
from trivet.config.schema.model import Dtype, LoRAConfig, TrainerModelConfig
from trivet.config.schema.trainer import AdamWConfig, ConstantSchedule
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.model.export import Exporter
from trivet.trainer.model.policy_model import load_policy, torch_dtype
from trivet.trainer.optim.optimizer import LearningRate, make_optimizer
from trivet.trainer.probe import score
from trivet.trainer.ranks.world import World, open_world
from trivet.trainer.step import Learner, train_step
from trivet.weights import delta as delta_module
from trivet.weights.delta import apply_deltas
from trivet.weights.manifest import Manifest, verify
from trivet.weights.publish import DeltaPublisher, publish
from trivet.wire.rollouts import Sample
from trivet.wire.versions import PolicyVersion, Step

_SAMPLE_TOKENS = 64
_GIGABIT = 125e6
"""Bytes that a link of 1 Gbit/s carries in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and how it is trained."""

    model: str
    lr: float
    lora: bool = False
    betas2: float = 0.999
    weight_decay: float = 0.01

    @property
    def name(self) -> str:
        """The name in the results."""
        return f"{self.model} {'LoRA' if self.lora else 'full'} lr {self.lr:.0e}"


_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
CASES = [
    Case(model="smollm2", lr=1e-6),
    Case(model="smollm2", lr=1e-5),
    Case(model="smollm2", lr=1e-5, lora=True),
    Case(model="quickstart", lr=1e-4, betas2=0.95, weight_decay=0.0),  # as configs/quickstart/rl.toml
    Case(model="quickstart", lr=1e-4, betas2=0.95, weight_decay=0.0, lora=True),
]


def make_learner(case: Case, model: Path, world: World) -> Learner:
    """Load the model, with the optimizer and loss of a run."""
    config = TrainerModelConfig(
        name=str(model), seq_len=512, compute_dtype="bfloat16", lora=LoRAConfig() if case.lora else None
    )
    policy = load_policy(config, world)
    optimizer = AdamWConfig(lr=case.lr, betas2=case.betas2, weight_decay=case.weight_decay)
    return Learner(
        model=policy,
        optimizer=make_optimizer(policy.trained_parameters, optimizer),
        learning_rate=LearningRate(peak=case.lr, schedule=ConstantSchedule(), max_steps=None),
        loss=make_policy_loss(DefaultLossConfig()),
        max_norm=1.0,
        world=world,
    )


def read_samples(tokenizer: Any, num_tokens: int) -> Iterator[list[list[int]]]:
    """Yield for each step samples of the documentation's text."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
    ids = tokenizer(text)["input_ids"]
    samples = [ids[start : start + _SAMPLE_TOKENS] for start in range(0, len(ids) - _SAMPLE_TOKENS, _SAMPLE_TOKENS)]
    np.random.default_rng(0).shuffle(samples)
    count = num_tokens // _SAMPLE_TOKENS
    for start in range(0, len(samples) - count, count):
        yield samples[start : start + count]


def take_step(learner: Learner, samples: list[list[int]], step: int) -> None:
    """Train on samples as if the model had sampled them, with random advantages."""
    rng = np.random.default_rng(step)
    probe = score(learner.model, samples, learner.world, dtype="bfloat16")
    items = [
        PackItem(
            sample=Sample(
                token_ids_T=np.array(ids, dtype=np.int32),
                loss_mask_T=np.arange(len(ids)) > 0,
                logprobs_T=np.array([0.0, *scored.logprobs], dtype=np.float32),
                versions=[],
                temperature=1.0,
            ),
            advantage=float(rng.normal()),
        )
        for ids, scored in zip(samples, probe.samples, strict=True)
    ]
    train_step(learner, pack(items, seq_len=512), step=Step(step))


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a call, in all threads."""
    started, started_cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - started, time.process_time() - started_cpu


class TimedDeltas(DeltaPublisher):
    """Notes how long the last delta took."""

    seconds = (0.0, 0.0)

    def add(self, directory: Path, manifest: Manifest) -> Manifest:
        """Time the addition of the delta."""
        found: list[Manifest] = []
        self.seconds = timed(lambda: found.append(DeltaPublisher.add(self, directory, manifest)))
        return found[0]


def measure(
    case: Case, model: Path, directory: Path, *, dtypes: Sequence[Dtype], steps: int, tokens: int
) -> list[dict[str, Any]]:
    """Train, publish and apply; return the figures of one case in each dtype."""
    publishers = {dtype: TimedDeltas(RunLayout(directory / dtype), anchor_interval=1 << 30) for dtype in dtypes}
    rows: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in dtypes}
    with open_world(device="auto", timeout_s=600) as world:
        tokenizer = AutoTokenizer.from_pretrained(model)
        learner = make_learner(case, model, world)
        exporters = {d: Exporter(model=learner.model, tokenizer=tokenizer, dtype=torch_dtype(d)) for d in dtypes}
        for step, samples in zip(range(steps + 1), read_samples(tokenizer, tokens), strict=False):
            if step:
                take_step(learner, samples, step)
            for dtype, exporter in exporters.items():
                weights = exporter.gather(keep=True)
                manifest = publish(
                    publishers[dtype].layout,
                    version=PolicyVersion(step),
                    run_id="bench",
                    write=lambda path, exporter=exporter, weights=weights: exporter.write(path, weights),
                    deltas=publishers[dtype],
                )
                if step:
                    rows[dtype].append(measure_step(publishers[dtype].layout, manifest, publishers[dtype]))
                    print(case.name, dtype, step, rows[dtype][-1], file=sys.stderr, flush=True)
    return [{"case": case.name, "dtype": dtype, "first_step": rows[dtype][0], **summarize(rows[dtype])} for dtype in dtypes]


def summarize(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over all steps but the first, and the seconds that delta and whole policy take at 1 Gbit/s."""
    medians = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    return {
        **medians,
        "delta_at_1_gbit_s": medians["delta_bytes"] / _GIGABIT + medians["apply_s"],
        "full_at_1_gbit_s": medians["full_bytes"] / _GIGABIT,
    }


def find_changed_share(base: Path, directory: Path) -> float:
    """Return the share of the weights whose bits differ."""
    num_changed = num_values = 0
    for path in directory.glob("*.safetensors"):
        old, new = load_file(base / path.name), load_file(path)
        for name, tensor in new.items():
            bits = torch.int16 if tensor.element_size() == 2 else torch.int32
            num_changed += int((tensor.view(bits) != old[name].view(bits)).sum())
            num_values += tensor.numel()
    return num_changed / num_values


def measure_step(layout: RunLayout, manifest: Manifest, deltas: TimedDeltas) -> dict[str, float]:
    """Apply the newest delta to a copy of its base, and return the figures."""
    version, result, delta = manifest.version, layout.root / "result", manifest.deltas[-1]
    base, directory = layout.weights_step(version - 1), layout.weights_step(version)
    verify(base)
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    apply_s, apply_cpu_s = timed(
        lambda: apply_deltas([directory / delta.name], base, result, manifest=manifest)
    )  # verifies too
    num_bytes, changed_share = delta.file.num_bytes, find_changed_share(base, directory)
    shutil.rmtree(base)
    return {
        "changed_share": changed_share,
        "delta_bytes": num_bytes,
        "full_bytes": manifest.num_bytes,
        "delta_share": num_bytes / manifest.num_bytes,
        "write_s": deltas.seconds[0],
        "write_cpu_s": deltas.seconds[1],
        "apply_s": apply_s,
        "apply_cpu_s": apply_cpu_s,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024, help="a step's")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES], help="names of cases, or parts of names")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=_DTYPES, help="in which policies are published")
    args = parser.parse_args()
    delta_module.MAX_DELTA_SHARE = 2.0
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        tiny = Path(scratch) / "tiny"
        subprocess.run([sys.executable, "-m", "trivet.examples.tiny_model", tiny], check=True, stdout=subprocess.DEVNULL)
        for number, case in enumerate(case for case in CASES if any(part in case.name for part in args.cases)):
            model, directory = args.smollm2 if case.model == "smollm2" else tiny, Path(scratch) / str(number)
            results.extend(measure(case, model, directory, dtypes=args.dtypes, steps=args.steps, tokens=args.tokens))
            shutil.rmtree(directory)
    print(
        json.dumps(
            {
                "benchmark": "delta",
                "cases": results,
                "config": {"steps": args.steps, "tokens": args.tokens},
                "versions": {"torch": torch.__version__, "numpy": np.__version__},
                "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
            }
        )
    )


if __name__ == "__main__":
    main()
