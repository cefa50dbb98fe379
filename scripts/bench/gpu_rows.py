"""How fast are the trainer's steps on one GPU, next to the published step times of prime-rl on one H100?

The cases are the lines of the table that prime-rl published on 2026-01-15 for one H100 80 GB: one made-up sequence of the full
length per row, two rows a step, four steps of which the first does not count, float32 master weights and reduction, full
activation checkpointing, compiled blocks, AdamW. Each runs through `--bench` in a process of its own, on random weights of the
model's shape: nothing is downloaded. The ceiling of a case is 100 % MFU.

    uv run python scripts/bench/gpu_rows.py [--only rl-full-16384 …] [--shape NAME --seq-len N] [-- --model.compile None …]

What follows `--` goes to every case, e.g. to take compilation or checkpointing away. `--shape` and `--seq-len` replace those of
every case, to try the script where there is no GPU; then no ratio is reported. The last line is one JSON object; the exit code is
1 when a case failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
_LOG_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCase:
    """One line of the published table."""

    name: str
    command: str
    """`trainer` or `sft`."""
    shape: str
    """A name of scripts/make_shape.py."""
    seq_len: int
    lora_rank: int | None = None
    published_s: float
    """Step time of prime-rl on one H100, the faster of its published runs."""
    published_gib: float
    """Its peak memory."""


CASES = (
    PublishedCase(
        name="rl-full-16384", command="trainer", shape="Qwen3-0.6B", seq_len=16_384, published_s=1.99, published_gib=12.5
    ),
    PublishedCase(
        name="rl-full-65536", command="trainer", shape="Qwen3-0.6B", seq_len=65_536, published_s=12.18, published_gib=19.6
    ),
    PublishedCase(
        name="rl-lora-16384",
        command="trainer",
        shape="Qwen3-0.6B",
        seq_len=16_384,
        lora_rank=16,
        published_s=2.45,
        published_gib=5.1,
    ),
    PublishedCase(
        name="rl-lora-65536",
        command="trainer",
        shape="Qwen3-0.6B",
        seq_len=65_536,
        lora_rank=16,
        published_s=13.16,
        published_gib=11.5,
    ),
    PublishedCase(name="sft-full-8192", command="sft", shape="Qwen3-0.6B", seq_len=8192, published_s=0.62, published_gib=31.7),
    PublishedCase(
        name="sft-full-16384", command="sft", shape="Qwen3-0.6B", seq_len=16_384, published_s=1.28, published_gib=52.8
    ),
    PublishedCase(
        name="rl-lora-4b-16384",
        command="trainer",
        shape="Qwen3-4B-Instruct-2507",
        seq_len=16_384,
        lora_rank=16,
        published_s=5.26,
        published_gib=23.3,
    ),
    PublishedCase(
        name="rl-lora-4b-65536",
        command="trainer",
        shape="Qwen3-4B-Instruct-2507",
        seq_len=65_536,
        lora_rank=16,
        published_s=31.49,
        published_gib=42.0,
    ),
)


def case_flags(
    case: PublishedCase, *, directory: Path, output_json: Path, is_cuda: bool, extra: Sequence[str] = ()
) -> list[str]:
    """Return the flags of `trainer` or `sft` that measure `case`; `extra` ones come last and win."""
    flags = ["--model.name", str(directory), "--model.debug.random-init", "--model.seq-len", str(case.seq_len)]
    flags += ["--bench.output-json", str(output_json), "--bench.num-steps", "4", "--bench.rows-per-rank", "2"]
    if case.lora_rank is not None:
        flags += ["--model.lora.rank", str(case.lora_rank)]
    if is_cuda:
        flags += ["--model.ac.freq", "1", "--model.compile"]
    return [*flags, *extra]


def measure(
    case: PublishedCase, *, scratch: Path, is_cuda: bool, extra: Sequence[str], is_published_shape: bool
) -> dict[str, Any]:
    """Measure one case in a process of its own."""
    directory, output_json = scratch / case.shape, scratch / f"{case.name}.json"
    subprocess.run([sys.executable, str(_ROOT / "scripts" / "make_shape.py"), case.shape, str(directory)], check=True)
    flags = case_flags(case, directory=directory, output_json=output_json, is_cuda=is_cuda, extra=extra)
    print(f"{case.name}: {case.command} {' '.join(flags)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", f"trivet.launcher.commands.{case.command}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout, flush=True)
        return {"row": case.name, "exit_code": done.returncode, "error": "\n".join(done.stdout.splitlines()[-_LOG_LINES:])}
    return summarize(case, json.loads(output_json.read_text()), is_published_shape=is_published_shape)


def summarize(case: PublishedCase, report: dict[str, Any], *, is_published_shape: bool) -> dict[str, Any]:
    """Return the result of one case; a `speedup` above 1 is faster than published."""
    found = {
        "row": case.name,
        "step_time_s": report["step_time"]["mean"],
        "step_time_std_s": report["step_time"]["std"],
        "tokens_per_s": report["throughput"]["mean"],
        "mfu_percent": report["mfu"]["mean"],
        "model_mfu_percent": report["model_mfu"]["mean"],
        "peak_memory_gib": report["peak_memory"]["gib"],
        "device": report["device"],
        "versions": report["versions"],
    }
    if is_published_shape:
        found |= {
            "published_step_time_s": case.published_s,
            "published_peak_memory_gib": case.published_gib,
            "speedup": case.published_s / report["step_time"]["mean"],
        }
    return found


def main() -> int:
    """Run the benchmark; return its exit code."""
    own, extra = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], default=[case.name for case in CASES])
    parser.add_argument("--shape")
    parser.add_argument("--seq-len", type=int)
    args = parser.parse_args(own)
    is_published_shape = args.shape is None and args.seq_len is None
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="trivet-gpu-rows-") as scratch:
        for case in (case for case in CASES if case.name in args.only):
            changed = replace(case, shape=args.shape or case.shape, seq_len=args.seq_len or case.seq_len)
            result = measure(
                changed,
                scratch=Path(scratch),
                is_cuda=torch.cuda.is_available(),
                extra=extra,
                is_published_shape=is_published_shape,
            )
            print(_line(result), flush=True)
            results.append(result)
    print(json.dumps({"rows": results, "flags": extra, "published": "prime-rl, one H100 80 GB, 2026-01-15"}))
    return int(any("error" in result for result in results))


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into this script's own words and those after `--`."""
    place = words.index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['row']}: failed with exit code {result['exit_code']}"
    against = f", {result['speedup']:.2f}x of the published {result['published_step_time_s']} s" if "speedup" in result else ""
    return (
        f"{result['row']}: {result['step_time_s']:.3f} s a step{against}, {result['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {result['mfu_percent']:.1f} %, peak {result['peak_memory_gib']:.1f} GiB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
