"""Does a run over two nodes take longer than the same run on one, where both have the same processors?

The same run in turns: all roles on one node, and the trainer with the orchestrator on the first and the server on the second of two
network namespaces of this machine. What differs is what nodes cost: the agent, its messages, addresses in place of loopback, and
the file that says where servers are. The machine, its cores and its files are the same, so a network is what this cannot show.

    uv run python scripts/bench/nodes.py [--rounds 3] [--steps 40]     as root

`one_s` and `two_s` are seconds a step from step FIRST_STEP on, medians over rounds; `overhead` is the median over rounds of two
over one, less 1. The limit is 0. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from training import hardware

from trivet.config.layout import RunLayout
from trivet.examples.tiny_model import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.nodes import Nodes, make_nodes  # noqa: E402  # the tests' namespaces

FIRST_STEP = 5
"""Steps before it wait for the server, and for torch and vLLM to have seen every shape once."""
TIMEOUT_S = 900
OVER_NODES = ["--deployment.type", "multi_node", "--deployment.gpus-per-node", "0"]


def measure(nodes: Nodes, model: Path, directory: Path, *, count: int, steps: int) -> float:
    """Run on `count` nodes; return the seconds of a step."""
    layout, log = RunLayout(directory / "run"), directory / "log"
    words = {
        "--output-dir": layout.root,
        "--max-steps": steps,
        "--model.name": model,
        "--orchestrator.batch-size": 64,
        "--orchestrator.rollouts-per-example": 8,
        "--orchestrator.sampling.max-tokens": 16,
        "--ckpt.interval": steps,
    }
    given = [str(word) for pair in words.items() for word in pair]
    command = [sys.executable, "-m", "trivet.launcher.commands.rl", "@", str(ROOT / "configs/smollm2/rl.toml"), *given]
    os.chdir(ROOT)
    started = [
        nodes.start(
            node,
            [*command, *OVER_NODES, "--deployment.node-rank", str(node)] if count > 1 else command,
            log=log,
            environ=os.environ,
        )
        for node in reversed(range(count))
    ]
    try:
        codes = [process.wait(TIMEOUT_S) for process in started]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {TIMEOUT_S} s: {log.read_text()[-2000:]}") from None
    if any(codes):
        raise RuntimeError(f"ended with {codes}: {log.read_text()[-2000:]}")
    rows = [json.loads(line) for line in (layout.metrics / "trainer.jsonl").read_text().splitlines()]
    times = {row["step"]: row["time"] for row in rows}
    return (times[steps] - times[FIRST_STEP]) / (steps - FIRST_STEP)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name, make_nodes(2) as nodes:
        model, tokenizer = Path(name) / "tiny", make_tokenizer()
        make_model(tokenizer, hidden_size=128, layers=2, seed=1, tied=True).save_pretrained(model)
        tokenizer.save_pretrained(model)
        for number in range(args.rounds):
            for count in (1, 2):
                directory = Path(name) / f"{number}-{count}"
                directory.mkdir()
                seconds[count].append(measure(nodes, model, directory, count=count, steps=args.steps))
                print(f"{count} node(s): {seconds[count][-1]:.3f} s a step", flush=True)
    result = {
        "bench": "nodes",
        "overhead": round(statistics.median(two / one for one, two in zip(seconds[1], seconds[2], strict=True)) - 1, 3),
        "limit": 0.0,
        "one_s": round(statistics.median(seconds[1]), 4),
        "two_s": round(statistics.median(seconds[2]), 4),
        "rounds_s": {count: [round(each, 4) for each in found] for count, found in seconds.items()},
        "steps": args.steps,
        "hardware": hardware(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
