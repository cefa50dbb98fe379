"""How much faster is a step in which the tokens that samples share are computed once?

One trainer takes the same step with `model.share_prefixes` and without it, in turns, on three batches:

- short: eight groups of eight answers of 36 tokens to prompts of 43, as SmolLM2's step on reverse-text;
- long: groups of eight answers of 100 tokens to prompts of 1,000;
- unshared: samples of 128 tokens that share nothing; what looking for shared tokens costs.

    uv run python scripts/bench/prefixes.py [--model tiny|DIRECTORY] [--dtype float32] [--repeats 7] [--groups 2]
        [--batches short long unshared]

Medians of pairs of neighbouring steps, after one pair to warm up. `limit` is the ratio of the operations that both layouts need: no
implementation gains more at the same rate. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from training import make_our_learner

from trivet.algorithms.packing import PackItem, pack
from trivet.config.compute_dtype import choose_dtype
from trivet.examples.tiny_model import make_model, make_tokenizer
from trivet.machine import inspect_machine
from trivet.trainer.ranks.world import open_world
from trivet.trainer.step import Learner, StepResult, train_step
from trivet.wire.batches import MicroBatch
from trivet.wire.rollouts import Sample
from trivet.wire.versions import Step

SEQ_LEN = 2048
"""Tokens of a row."""
BATCHES = ["short", "long", "unshared"]
GROUP_SIZE = 8
UNSHARED_LENGTH = 128


def make_group(*, prompt: int, answer: int, size: int, vocab_size: int, rng: np.random.Generator) -> list[PackItem]:
    """Make `size` samples with one prompt and answers of their own, of these lengths in tokens."""
    prompt_ids = rng.integers(0, vocab_size, prompt)
    length = prompt + answer
    return [
        PackItem(
            sample=Sample(
                token_ids_T=np.concatenate([prompt_ids, rng.integers(0, vocab_size, answer)]).astype(np.int32),
                loss_mask_T=np.arange(length) >= prompt,
                logprobs_T=np.full(length, -np.log(vocab_size), dtype=np.float32),
                versions=[],
                temperature=1.0,
            ),
            advantage=float(rng.normal()),
        )
        for _ in range(size)
    ]


def make_batches(vocab_size: int, *, num_long_groups: int) -> dict[str, list[MicroBatch]]:
    """Make the rows of each batch."""
    rng = np.random.default_rng(0)
    shapes = {
        "short": (8, {"prompt": 43, "answer": 36, "size": GROUP_SIZE}),
        "long": (num_long_groups, {"prompt": 1000, "answer": 100, "size": GROUP_SIZE}),
        "unshared": (32, {"prompt": UNSHARED_LENGTH // 2, "answer": UNSHARED_LENGTH // 2, "size": 1}),
    }
    return {
        name: pack(
            [item for _ in range(count) for item in make_group(**shape, vocab_size=vocab_size, rng=rng)], seq_len=SEQ_LEN
        )
        for name, (count, shape) in shapes.items()
    }


def measure(learner: Learner, rows: list[MicroBatch], *, repeats: int) -> dict[str, float]:
    """Return medians of `repeats` pairs of steps, one with shared prefixes and one without."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    results: dict[bool, StepResult] = {}
    for _ in range(1 + repeats):
        for shares in (True, False):
            learner.model.shares_prefixes = shares
            started = time.perf_counter()
            results[shares] = train_step(learner, rows, step=Step(1))
            seconds[shares].append(time.perf_counter() - started)
    pairs = zip(seconds[True][1:], seconds[False][1:], strict=True)
    num_tokens = sum(row.num_tokens for row in rows)
    shared_s = statistics.median(seconds[True][1:])
    return {
        "learnt_ratio": round(statistics.median(repeated / shared for shared, repeated in pairs), 3),
        "limit": round(results[False].flops / results[True].flops, 3),
        "tokens": num_tokens,
        "computed_tokens": results[True].num_computed_tokens,
        "learnt_tokens_per_s": round(num_tokens / shared_s, 1),
        "shared_s": round(shared_s, 3),
        "repeated_s": round(statistics.median(seconds[False][1:]), 3),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = choose_dtype(inspect_machine(), is_on_gpu=torch.cuda.is_available()).dtype
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=own)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", choices=BATCHES, nargs="+", default=BATCHES)
    parser.add_argument("--groups", type=int, default=2, help="groups with long prompts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, open_world(device="auto", timeout_s=600) as world:
        name = args.model
        if name == "tiny":
            name = str(Path(directory) / "tiny")
            tokenizer = make_tokenizer()
            make_model(tokenizer, hidden_size=128, layers=2, seed=1, tied=True).save_pretrained(name)
        learner = make_our_learner(name, args.dtype, world, seq_len=SEQ_LEN)
        batches = make_batches(learner.model.embedding.num_embeddings, num_long_groups=args.groups)
        found = {kind: measure(learner, batches[kind], repeats=args.repeats) for kind in args.batches}
    result = {
        "bench": "prefixes",
        **{f"learnt_ratio_{kind}": found[kind]["learnt_ratio"] for kind in args.batches if kind != "unshared"},
        **({"overhead_unshared": round(1 / found["unshared"]["learnt_ratio"] - 1, 4)} if "unshared" in found else {}),
        "batches": found,
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "repeats": args.repeats,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
