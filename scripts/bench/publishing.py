"""How much longer does a step take that publishes its policy?

A step with publishing copies the weights, trains while a thread writes them, and waits for the thread, as a run that publishes
every step does. It is compared with the step alone, in interleaved pairs: what else the machine does meets both. Publishing should
cost at most 3 % of a step.

    uv run python scripts/bench/publishing.py [--model DIRECTORY] [--dtype float32] [--tokens 8192] [--length 128] [--pairs 10]

Without a model it makes the quickstart's tiny one, whose steps are too short to hide the write. The last line is one JSON object:
`cost` is the median of the pairs' ratios less 1, with its limit beside it.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from training import ROW_TOKENS, make_items, make_our_learner
from weights import make_tiny_model

from trivet.algorithms.packing import pack
from trivet.config.layout import RunLayout
from trivet.config.sections.shared import RunIdentity
from trivet.config.sections.trainer import TrainerConfig
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.background import Background
from trivet.trainer.model.export import Exporter, load_tokenizer
from trivet.trainer.policy_publisher import PolicyPublisher
from trivet.trainer.ranks.world import open_world
from trivet.trainer.step import train_step
from trivet.wire.versions import Step

LIMIT = 0.03
"""Share of a step that publishing may cost."""
WARM_UP = 2
"""Pairs that do not count: the first publication allocates the memory of the copies."""


def measure(args: argparse.Namespace, model: Path, directory: Path) -> list[tuple[float, float, float]]:
    """Return, for each pair, the seconds of the step alone, of the one that publishes, and of its wait for the write."""
    layout, run = RunLayout(directory), RunIdentity()
    layout.weights.mkdir(parents=True)
    pairs: list[tuple[float, float, float]] = []
    with open_world(device="auto", timeout_s=600) as world:
        learner = make_our_learner(str(model), args.dtype, world)
        items = make_items(args.tokens // args.length, length=args.length, vocab_size=learner.model.embedding.num_embeddings)
        rows = pack(items, seq_len=ROW_TOKENS)
        config = TrainerConfig.model_validate({"model": {"name": str(model)}})
        exporter = Exporter(model=learner.model, tokenizer=load_tokenizer(config), dtype=torch.bfloat16)
        telemetry = Telemetry("trainer", layout=layout, run=run)
        publisher = PolicyPublisher(
            layout=layout,
            world=world,
            exporter=exporter,
            run_id=run.id,
            num_bytes=2 * learner.model.num_parameters,
            telemetry=telemetry,
            work=Background("publisher", is_async=True),
        )
        for index in range(1, WARM_UP + args.pairs + 1):
            started = time.perf_counter()
            train_step(learner, rows, step=Step(index))
            alone = time.perf_counter()
            publisher.publish(Step(index), probe=None)
            train_step(learner, rows, step=Step(index))
            trained = time.perf_counter()
            publisher.work.wait()
            written = time.perf_counter()
            pairs.append((alone - started, written - alone, written - trained))
        telemetry.close()
    return pairs[WARM_UP:]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        model = args.model or make_tiny_model(Path(scratch) / "tiny")
        pairs = measure(args, model, Path(scratch) / "outputs")
    ratios = [publishing / alone for alone, publishing, _ in pairs]
    alone_s, publishing_s, waited_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    result = {
        "cost": round(statistics.median(ratios) - 1, 4),
        "limit": LIMIT,
        "ratios": [round(ratio, 4) for ratio in sorted(ratios)],
        "step_s": round(alone_s, 4),
        "step_with_publishing_s": round(publishing_s, 4),
        "waited_for_the_write_s": round(waited_s, 4),
        "config": {"model": model.name, "dtype": args.dtype, "tokens": args.tokens, "length": args.length, "pairs": args.pairs},
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
