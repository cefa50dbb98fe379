"""Measures the memory of activations when ranks compute a row together (`model.cp`): bytes that autograd keeps in a forward pass.

    uv run python scripts/bench/context.py [--tokens 4096] [--sizes 1 2 4]

The model has four blocks as wide as those of SmolLM2-135M, and a small vocabulary. Each rank counts the tensors with a value for
each token, of its slice or of the row, that autograd saves; each storage once. The last line is JSON: for each cp the largest of
the ranks, and its share of the bytes at cp 1. The limit is 1 / cp.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, LlamaConfig

from trivet.config.schema.model import TrainerModelConfig
from trivet.trainer.measurement.fake import fake_rows
from trivet.trainer.model.policy_model import load_policy
from trivet.trainer.ranks.world import gather_bytes, open_world
from trivet.trainer.rows import to_tensors

_SHAPE = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=3,
    vocab_size=256,
    max_position_embeddings=16_384,
)
"""4 heads of 48 features divide 12: cp may be 1, 2, 3, 4, 6 and 12."""


def count_on_rank(model_dir: str, *, num_tokens: int, cp: int) -> None:
    """Print the bytes that autograd keeps, on the rank where they are most."""
    config = TrainerModelConfig(
        name=model_dir, seq_len=num_tokens, cp=cp, compute_dtype="float32", optimization_dtype="float32"
    )
    with open_world(device="cpu", timeout_s=300, context_size=cp) as world:
        model = load_policy(config, world)
        (row,) = fake_rows(0, seed=0, seq_len=num_tokens, vocab_size=_SHAPE.vocab_size, num_rows=1)
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not {num_tokens, num_tokens // cp}.isdisjoint(tensor.shape):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            scores = model(to_tensors(row, device=world.device))
        scores.logprobs_N.sum().backward()
        largest = max(int(part) for part in gather_bytes(world, b"%d" % sum(sizes.values())))
        if world.is_main:
            print(largest)


def main() -> None:
    """Start the ranks of each size, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        count_on_rank(args.rank_of, num_tokens=args.tokens, cp=args.sizes[0])
        return
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(_SHAPE).save_pretrained(directory)
        sizes: dict[int, int] = {}
        for cp in args.sizes:
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={cp}"]
            words = [str(Path(__file__)), f"--tokens={args.tokens}", f"--sizes={cp}", f"--rank-of={directory}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            run = subprocess.run([sys.executable, "-m", *torchrun, *words], env=environment, stdout=subprocess.PIPE, check=True)
            sizes[cp] = int(run.stdout.split()[-1])
            print(f"cp {cp}: {sizes[cp] / 2**20:.1f} MiB", file=sys.stderr)
    first = sizes[args.sizes[0]] * args.sizes[0]
    result = {
        str(cp): {"bytes": size, "share": round(size / first, 4), "limit": round(1 / cp, 4)} for cp, size in sizes.items()
    }
    print(json.dumps({"tokens": args.tokens, "activations": result}))


if __name__ == "__main__":
    main()
