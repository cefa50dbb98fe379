"""How much faster does each of the trainer's CPU mechanisms make a step, against what torch or transformers would do instead?

A mechanism that gains nothing has no ceiling to reach and can go. The mechanisms are in `trivet.trainer.kernels` and
`trivet.trainer.attention.grouped`; what takes the place of each is in `MECHANISMS`.

    uv run python scripts/bench/cpu_mechanisms.py [--model tiny|DIRECTORY] [--tokens 2048] [--length 128] [--pairs 5]
        [--mechanisms all grouped …]

One model takes all steps, in float32: step with, step without, step with, and so on, for one mechanism after the other. So that
whatever else the machine does falls on both. `ratio` is the median over pairs of the time without over the time with; the first
pair of each mechanism is a warm-up. The last line is one JSON object. In bfloat16 transformers cannot compute over float32 weights,
so there is no step without: `training.py` compares with a plain loop there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from training import ROW_TOKENS, hardware, make_items, make_our_learner
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trivet.algorithms.packing import pack
from trivet.launcher.plan import rank_environment
from trivet.trainer.attention.choice import HeadDims
from trivet.trainer.attention.packed import register_attention
from trivet.trainer.kernels import cpu
from trivet.trainer.kernels.lanes import Lanes
from trivet.trainer.model.policy_model import PolicyModel
from trivet.trainer.ranks.world import open_world
from trivet.trainer.step import train_step
from trivet.wire.versions import Step

_IS_CHILD = "CPU_MECHANISMS_CHILD"
"""Variable of the process that measures: it has the allocator settings that the launcher gives a rank."""


@contextmanager
def _own_forward(model: PolicyModel, replacement: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let the modules whose forward is `replacement` compute as torch and transformers wrote them."""
    taken = {
        module: module.__dict__.pop("forward")
        for module in model.modules()
        if getattr(module.__dict__.get("forward"), "func", None) is replacement
    }
    assert taken, f"no module of this model has a {replacement.__name__}"
    try:
        yield
    finally:
        for module, forward in taken.items():
            module.forward = forward


@contextmanager
def without_linear(model: PolicyModel) -> Iterator[None]:
    """Compute linear layers as torch does."""
    with _own_forward(model, cpu.apply_linear):
        yield


@contextmanager
def without_norm(model: PolicyModel) -> Iterator[None]:
    """Compute RMS norms as transformers does."""
    with _own_forward(model, cpu.apply_norm):
        yield


@contextmanager
def without_embedding(model: PolicyModel) -> Iterator[None]:
    """Leave the gradients of embedding and head to autograd."""
    masters = model._masters
    assert masters is not None
    with _own_forward(model, cpu.embed):
        masters.sums_gradients = False
        try:
            yield
        finally:
            masters.sums_gradients = True


@contextmanager
def without_rotary(model: PolicyModel) -> Iterator[None]:
    """Rotate queries and keys as transformers does."""
    modeling: Any = sys.modules[type(model.causal_lm).__module__]
    assert modeling.apply_rotary_pos_emb is cpu.rotate
    modeling.apply_rotary_pos_emb = apply_rotary_pos_emb
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = cpu.rotate


@contextmanager
def without_lanes(model: PolicyModel) -> Iterator[None]:
    """Compute one row after the other, each with all threads."""
    lanes, model.lanes = model.lanes, Lanes()
    try:
        yield
    finally:
        model.lanes = lanes


@contextmanager
def without_grouped(model: PolicyModel) -> Iterator[None]:
    """Compute attention sample by sample with torch's scaled_dot_product_attention."""
    config = model.causal_lm.config
    grouped = config._attn_implementation
    config._attn_implementation = register_attention(
        "sdpa", device=torch.device("cpu"), dtype=torch.float32, heads=HeadDims(query=64, value=64)
    )
    assert config._attn_implementation != grouped
    try:
        yield
    finally:
        config._attn_implementation = grouped


@contextmanager
def without_all(model: PolicyModel) -> Iterator[None]:
    """Leave out every mechanism."""
    with ExitStack() as stack:
        for name, without in MECHANISMS.items():
            if name != "all":
                stack.enter_context(without(model))
        yield


MECHANISMS: dict[str, Callable[[PolicyModel], Any]] = {
    "all": without_all,
    "linear": without_linear,
    "norm": without_norm,
    "rotary": without_rotary,
    "embedding": without_embedding,
    "lanes": without_lanes,
    "grouped": without_grouped,
}


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure each mechanism; return medians and ratios by its name."""
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    rows = pack(make_items(args.tokens // args.length, length=args.length, vocab_size=vocab_size), seq_len=ROW_TOKENS)
    found: dict[str, dict[str, float]] = {}
    with open_world(device="cpu", timeout_s=600) as world:
        learner = make_our_learner(args.model, "float32", world)

        def step_s() -> float:
            started = time.perf_counter()
            train_step(learner, rows, step=Step(1))
            return time.perf_counter() - started

        for name in args.mechanisms:
            pairs: list[tuple[float, float]] = []
            for _ in range(args.pairs + 1):
                with_s = step_s()
                with MECHANISMS[name](learner.model):
                    pairs.append((with_s, step_s()))
            ratios = sorted(without / with_ for with_, without in pairs[1:])
            found[name] = {
                "with_s": round(statistics.median(with_ for with_, _ in pairs[1:]), 4),
                "without_s": round(statistics.median(without for _, without in pairs[1:]), 4),
                "ratio": round(statistics.median(ratios), 4),
                "least_ratio": round(ratios[0], 4),
                "largest_ratio": round(ratios[-1], 4),
            }
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model directory; `tiny` makes the quickstart's")
    parser.add_argument("--tokens", type=int, default=2048, help="a step's")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--mechanisms", nargs="+", choices=list(MECHANISMS), default=list(MECHANISMS))
    args = parser.parse_args()
    if _IS_CHILD not in os.environ:
        own = rank_environment(1, num_cpus=os.cpu_count() or 1, is_on_cpu=True)
        command = [sys.executable, *sys.argv]
        raise SystemExit(subprocess.run(command, env={**own, **os.environ, _IS_CHILD: "1"}, check=False).returncode)
    name = args.model
    with tempfile.TemporaryDirectory() as scratch:
        if args.model == "tiny":
            args.model = str(Path(scratch) / "tiny")
            subprocess.run([sys.executable, "-m", "trivet.examples.tiny_model", args.model], check=True)
        found = measure(args)
    settings = {key: getattr(args, key) for key in ("tokens", "length", "pairs")}
    print(
        json.dumps(
            {
                "benchmark": "cpu_mechanisms",
                "dtype": "float32",
                "mechanisms": found,
                "config": {"model": Path(name).name, **settings},
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "hardware": hardware(),
            }
        )
    )


if __name__ == "__main__":
    main()
