"""Does a run over two nodes take longer than the same run on one, where both have the same processors?

The same run in turns: all roles on one machine, and on a Ray cluster of three network namespaces of this machine, with the driver
on one, the trainer and the orchestrator on the second, the server on the third. What differs is what nodes cost: Ray, actors and
their messages, addresses in place of loopback. The machine, its cores and its files are the same; a network cannot be shown so.

    uv run python scripts/bench/nodes.py [--rounds 3] [--steps 40]     as root

Times are seconds a step from step FIRST_STEP on; `overhead` is the median over rounds of two over one, less 1. The limit is 0.05.
The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from training import hardware

from trivet.config.layout import RunLayout
from trivet.examples.tiny_model import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.cluster_run import ENVIRON  # noqa: E402
from support.ray_nodes import RayNodes, make_ray_nodes  # noqa: E402  # the tests' namespaces

FIRST_STEP = 5
"""Steps before it wait for the server, and for torch and vLLM to have seen every shape once."""
TIMEOUT_S = 900
OVER_NODES = ["--deployment.type", "multi_node", "--deployment.gpus-per-node", "0"]


def measure(kind: str, model: Path, directory: Path, *, steps: int) -> float:
    """Run on one node, or on two of a Ray cluster; return the seconds of a step."""
    if kind == "two":
        with make_ray_nodes(3, directory=directory) as nodes:
            nodes.start_head(environ=ENVIRON)
            for machine in (1, 2):
                nodes.join(machine, environ=ENVIRON)
            return _measure(nodes, model, directory, OVER_NODES, environ=nodes.environ(ENVIRON), steps=steps)
    with make_ray_nodes(1, directory=directory) as nodes:
        return _measure(nodes, model, directory, [], environ=ENVIRON, steps=steps)


def _measure(
    nodes: RayNodes, model: Path, directory: Path, words: Sequence[str], *, environ: Mapping[str, str], steps: int
) -> float:
    layout, log = RunLayout(directory / "run"), directory / "log"
    values = {
        "--output-dir": layout.root,
        "--max-steps": steps,
        "--model.name": model,
        "--orchestrator.batch-size": 64,
        "--orchestrator.rollouts-per-example": 8,
        "--orchestrator.sampling.max-tokens": 16,
        "--ckpt.interval": steps,
    }
    given = [str(word) for pair in values.items() for word in pair]
    command = [sys.executable, "-m", "trivet.launcher.commands.rl", "@", str(ROOT / "configs/smollm2/rl.toml"), *given]
    os.chdir(ROOT)
    started = nodes.start(0, [*command, *words], log=log, environ=environ)
    try:
        code = started.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {TIMEOUT_S} s: {log.read_text()[-2000:]}") from None
    if code:
        raise RuntimeError(f"ended with {code}: {log.read_text()[-2000:]}")
    rows = [json.loads(line) for line in (layout.metrics / "trainer.jsonl").read_text().splitlines()]
    times = {row["step"]: row["time"] for row in rows}
    return (times[steps] - times[FIRST_STEP]) / (steps - FIRST_STEP)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    kinds = ("one", "two")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        model, tokenizer = Path(name) / "tiny", make_tokenizer()
        make_model(tokenizer, hidden_size=128, layers=2, seed=1, tied=True).save_pretrained(model)
        tokenizer.save_pretrained(model)
        for number in range(args.rounds):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                directory = Path(name) / f"{number}-{kind}"
                directory.mkdir()
                seconds[kind].append(measure(kind, model, directory, steps=args.steps))
                print(f"{kind}: {seconds[kind][-1]:.3f} s a step", flush=True)

    ratios = [two / one for one, two in zip(seconds["one"], seconds["two"], strict=True)]
    result = {
        "bench": "nodes",
        "overhead": round(statistics.median(ratios) - 1, 3),
        "limit": 0.05,
        "medians_s": {kind: round(statistics.median(found), 4) for kind, found in seconds.items()},
        "rounds_s": {kind: [round(each, 4) for each in found] for kind, found in seconds.items()},
        "steps": args.steps,
        "hardware": hardware(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
