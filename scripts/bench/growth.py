"""How do the time and the memory of each part grow with what it is given?

    uv run python scripts/bench/growth.py PART... [--output-dir docs/benchmarks]

Each PART is a table of its own, written to growth_PART.json:

- tokens: a training step over its tokens, 2k to 64k in rows of 2,048 (tiny model);
- sizes: a training step of 2,048 tokens over the model's parameters, 3M to 360M, random weights;
- ranks: a training step of 8,192 tokens over 1, 2 and 4 ranks with gloo on the cores that one rank has alone;
- in_flight: the orchestrator alone over the rollouts that are in flight, 1k to 100k;
- hours: the orchestrator alone over the rollouts of two days at ten a second, and its memory on the way;
- groups: `trivet check` over the groups of a history, 10k to 1,000k;
- resume: from the command to the first step, over the bytes of the checkpoint.

`limit` of a row is what growth without any overhead would give, from the first row or from the machine: for tokens and groups
proportional time, for sizes the rate of matrix products, for ranks the time of one. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from training import hardware
from transformers import LlamaConfig

from trivet.config.layout import RunLayout
from trivet.examples.tiny_model import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
BENCH = Path(__file__).parent
SEQ_LEN = 2048
TOKENS = (2048, 4096, 8192, 16_384, 32_768, 65_536)
SIZES: dict[str, dict[str, Any]] = {
    "3M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4},
    "15M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6},
    "60M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 15, "num_attention_heads": 9},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "360M": {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15},
}
"""Llama shapes of about these parameters; the last two are SmolLM2's."""
VOCAB_SIZES = {"3M": 2048, "15M": 8192}
DEFAULT_VOCAB_SIZE = 49_152
RANKS = (1, 2, 4)
IN_FLIGHT = (1_000, 10_000, 100_000)
TWO_DAYS = 48 * 3600 * 10
GROUPS = (10_000, 100_000, 1_000_000)


def make_shape(directory: Path, name: str) -> Path:
    """Write the shape of a model; returns its directory."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZES.get(name, DEFAULT_VOCAB_SIZE), num_key_value_heads=1, tie_word_embeddings=True, **SIZES[name]
    )
    config.save_pretrained(directory / name)
    return directory / name


def measure_step(model: Path, *, num_tokens: int, num_ranks: int = 1, num_steps: int = 4) -> dict[str, Any]:
    """Measure steps of `num_tokens` tokens over all ranks, as `rl --bench` does; returns its report."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        flags = {
            "--model.name": model,
            "--trainer-cpu-ranks": num_ranks,
            "--trainer.model.seq-len": min(SEQ_LEN, num_tokens // num_ranks),
            "--trainer.model.compute-dtype": "float32",
            "--trainer.bench.rows-per-rank": max(1, num_tokens // (SEQ_LEN * num_ranks)),
            "--trainer.bench.num-steps": num_steps,
            "--trainer.bench.answer-len": 128,
            "--trainer.bench.output-json": report,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        command = ["rl", "@", str(ROOT / "configs/smollm2/rl.toml"), *words, "--trainer.model.debug.random-init"]
        run([sys.executable, "-m", f"trivet.launcher.commands.{command[0]}", *command[1:]])
        return json.loads(report.read_text())


def run(command: list[str]) -> str:
    """Run a command; returns what it wrote to stdout.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def run_bench(name: str, *words: object) -> dict[str, Any]:
    """Run another benchmark; returns its last line."""
    return json.loads(run([sys.executable, str(BENCH / f"{name}.py"), *map(str, words)]).splitlines()[-1])


def step_row(report: dict[str, Any]) -> dict[str, float]:
    """Return what a table says of a step."""
    return {
        "step_s": round(report["step_time"]["mean"], 4),
        "spread_s": round(report["step_time"]["max"] - report["step_time"]["min"], 4),
        "peak_gib": round(report["peak_memory"]["gib"], 3),
        "mfu_pct": round(report["model_mfu"]["mean"], 1),
    }


def grow_tokens(scratch: Path) -> Iterator[dict[str, Any]]:
    """A step over its tokens."""
    model = make_shape(scratch, "3M")
    first = 0.0
    for tokens in TOKENS:
        row = step_row(measure_step(model, num_tokens=tokens))
        first = first or row["step_s"]
        yield {"tokens": tokens, **row, "limit": round(first * tokens / TOKENS[0], 4)}


def grow_sizes(scratch: Path) -> Iterator[dict[str, Any]]:
    """A step over the model's parameters."""
    for name in SIZES:
        report = measure_step(make_shape(scratch, name), num_tokens=SEQ_LEN)
        row = step_row(report)
        limit = row["step_s"] * row["mfu_pct"] / 100  # the time at the rate of matrix products
        yield {"parameters": report["num_parameters"], **row, "limit": round(limit, 4)}


def grow_ranks(scratch: Path) -> Iterator[dict[str, Any]]:
    """A step over the ranks that share it."""
    model = make_shape(scratch, "15M")
    first = 0.0
    for ranks in RANKS:
        row = step_row(measure_step(model, num_tokens=4 * SEQ_LEN, num_ranks=ranks))
        first = first or row["step_s"]
        yield {"ranks": ranks, **row, "limit": first, "overhead": round(row["step_s"] / first - 1, 3)}


def grow_in_flight(_: Path) -> Iterator[dict[str, Any]]:
    """The orchestrator over rollouts in flight."""
    for in_flight in IN_FLIGHT:
        found = run_bench(
            "orchestrator", "--in-flight", in_flight, "--rollouts", max(50_000, 2 * in_flight), "--verifiers-rollouts", 0
        )
        yield {"in_flight": in_flight} | {
            key: found[key] for key in ("rollouts_per_s", "loop_lag_p99_ms", "cpu_us_per_rollout", "rss_mib")
        }


def grow_hours(_: Path) -> Iterator[dict[str, Any]]:
    """The orchestrator over the rollouts of two days."""
    found = run_bench("orchestrator", "--in-flight", 10_000, "--rollouts", TWO_DAYS, "--verifiers-rollouts", 0)
    keys = ("rollouts_per_s", "rss_growth_mib", "loop_lag_p99_ms")
    whole = {key: found[key] for key in keys}
    for tenth, rss_mib in enumerate(found["rss_mib_by_tenth"], start=1):
        yield {"rollouts": TWO_DAYS * tenth // 10, "hours": round(4.8 * tenth, 1), "rss_mib": rss_mib} | whole


def grow_groups(_: Path) -> Iterator[dict[str, Any]]:
    """The checker over the groups of a history."""
    first = 0.0
    for groups in GROUPS:
        found = run_bench("checker", "--groups", groups, "--mutations", 0)
        first = first or found["seconds"]
        row = {key: found[key] for key in ("groups", "mib", "seconds", "read_s", "rss_mib")}
        yield {**row, "limit": round(first * groups / GROUPS[0], 3)}


def grow_resume(scratch: Path) -> Iterator[dict[str, Any]]:
    """Measure the time from the command to the first step, of a new run and of a resumed one."""
    for hidden in (128, 512, 1024):
        model = scratch / f"tiny_{hidden}"
        tokenizer = make_tokenizer()
        make_model(tokenizer, hidden_size=hidden, layers=4, seed=1, tied=True).save_pretrained(model)
        tokenizer.save_pretrained(model)
        layout = RunLayout(scratch / f"run_{hidden}")
        started_s = time_to_step(model, layout, step=1)
        resumed_s = time_to_step(model, layout, step=2, flags=["--ckpt.resume-step", "-1"])
        size = sum(file.stat().st_size for file in layout.checkpoints.rglob("*") if file.is_file())
        yield {"checkpoint_mib": round(size / 2**20, 1), "started_s": round(started_s, 2), "resumed_s": round(resumed_s, 2)}


def time_to_step(model: Path, layout: RunLayout, *, step: int, flags: list[str] | None = None) -> float:
    """Run to `step` and return the seconds from the command until it was trained."""
    words = {
        "--output-dir": layout.root,
        "--max-steps": step,
        "--model.name": model,
        "--ckpt.interval": 1,
        "--orchestrator.batch-size": 16,
        "--orchestrator.sampling.max-tokens": 16,
    }
    given = [str(word) for pair in words.items() for word in pair]
    started = time.time()
    run(
        [
            sys.executable,
            "-m",
            "trivet.launcher.commands.rl",
            "@",
            str(ROOT / "configs/smollm2/rl.toml"),
            *given,
            *(flags or []),
        ]
    )
    lines = (layout.metrics / "trainer.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["time"] - started


PARTS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    "tokens": grow_tokens,
    "sizes": grow_sizes,
    "ranks": grow_ranks,
    "in_flight": grow_in_flight,
    "hours": grow_hours,
    "groups": grow_groups,
    "resume": grow_resume,
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--output-dir", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {}
    for part in args.parts:
        tables[part] = []
        with tempfile.TemporaryDirectory() as scratch:
            for row in PARTS[part](Path(scratch)):
                print(part, json.dumps(row), flush=True)
                tables[part].append(row)
        found = {"benchmark": f"growth_{part}", "rows": tables[part], "hardware": hardware(), "torch": torch.__version__}
        (args.output_dir / f"growth_{part}.json").write_text(json.dumps(found) + "\n")
    print(json.dumps({"benchmark": "growth", **tables}))


if __name__ == "__main__":
    main()
