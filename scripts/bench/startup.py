"""How long is it from `rl` to the first trained step, where does the time go, and what would the processors allow?

A real run of one step: launcher, environment, vLLM, orchestrator, trainer. While it starts, the processor time of each of its
processes is read. Nothing can be faster than all of that time divided by the cores, nor than the imports of the inference server,
which one thread does: they are measured alone, in the same run (`limit_s` is the larger of the two).

    uv run python scripts/bench/startup.py [--model tiny|DIRECTORY] [--rounds 3] [-- FLAGS OF rl]

`marks_s` are seconds since the command until it has checked its configuration, until the roles are started, until each of them is
ready, and until a step is trained; `cpu_s` are processor seconds by process until then; medians over rounds. The last line is one
JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from training import hardware

from trivet.config.layout import RunLayout
from trivet.examples.tiny_model import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
POLL_INTERVAL_S = 0.02
PARTS = {
    "environments.workers": "environment workers",
    "inference.main": "inference",
    "orchestrator.main": "orchestrator",
    "trainer.main": "trainer",
}
"""What a process is, by the module in its command line. A child without one belongs to its parent: vLLM's engine, compilers."""
MARKS = {
    "checked": ("rl.log", "started inference"),
    "inference ready": ("rl.log", "inference ready"),
    "environment loaded": ("orchestrator.stdout", "environment loaded"),
    "model loaded": ("trainer.stdout", "model loaded"),
}
"""The log, and the words of it, that say when a part of the start is over."""
SERVER_IMPORTS = """
from trivet.process.imports import importing
import trivet.inference.main
with importing():
    from trivet.inference.vllm_names import FlexibleArgumentParser, build_app, make_arg_parser, serve_http
    from trivet.inference.versioned_engine import VersionedEngine
    make_arg_parser(FlexibleArgumentParser())
"""
"""The imports that the inference server cannot start without."""


def time_imports() -> float:
    """Return the seconds that the imports of the inference server take in a process of its own."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", SERVER_IMPORTS], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - started


def measure_start(model: Path, layout: RunLayout, flags: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Run one step; return the seconds until each mark, and the processor seconds of each part until the step."""
    words = {
        "--output-dir": layout.root,
        "--max-steps": 1,
        "--model.name": model,
        "--orchestrator.batch-size": 16,
        "--orchestrator.sampling.max-tokens": 16,
    }
    given = [str(word) for pair in words.items() for word in pair]
    command = [sys.executable, "-m", "trivet.launcher.commands.rl", "@", str(ROOT / "configs/smollm2/rl.toml"), *given, *flags]
    started = time.perf_counter()
    run = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    marks: dict[str, float] = {}
    cpu_s: dict[psutil.Process, float] = {}
    parts: dict[psutil.Process, str] = {run: "launcher"}
    metrics = layout.metrics / "trainer.jsonl"
    try:
        while "step trained" not in marks:
            now = time.perf_counter() - started
            if run.poll() is not None or now > TIMEOUT_S:
                raise RuntimeError(f"no step after {now:.0f} s, see {layout.logs}; the command was {' '.join(command)}")
            _read_processes(run, parts, cpu_s)
            for name in _find_marks(layout):
                marks.setdefault(name, now)
            if metrics.exists() and metrics.stat().st_size:
                marks["step trained"] = now
            time.sleep(POLL_INTERVAL_S)
    finally:
        if run.poll() is None:
            run.terminate()
        run.wait(60)
    totals = dict.fromkeys(parts.values(), 0.0)
    for process, seconds in cpu_s.items():
        totals[parts[process]] += seconds
    return marks, totals


def _read_processes(run: psutil.Process, parts: dict[psutil.Process, str], cpu_s: dict[psutil.Process, float]) -> None:
    for process in [run, *run.children(recursive=True)]:
        try:
            times, words, parent = process.cpu_times(), " ".join(process.cmdline()), process.parent()
        except psutil.NoSuchProcess:
            continue
        named = [part for module, part in PARTS.items() if f"trivet.{module}" in words or f"packages.{module}" in words]
        parts[process] = named[0] if named else parts.get(parent or run, "launcher")
        cpu_s[process] = times.user + times.system


def _find_marks(layout: RunLayout) -> list[str]:
    logs = {name: layout.log_file(name) for name, _ in MARKS.values()}
    texts = {name: file.read_text(errors="replace") if file.exists() else "" for name, file in logs.items()}
    return [mark for mark, (name, words) in MARKS.items() if words in texts[name]]


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(each[key] for each in rounds if key in each), 2) for key in rounds[0]}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny or a model directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="flags of rl, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch, model = Path(name), Path(args.model).absolute()
        if args.model == "tiny":
            model = scratch / "tiny"
            tokenizer = make_tokenizer()
            make_model(tokenizer, hidden_size=128, layers=2, seed=1, tied=True).save_pretrained(model)
            tokenizer.save_pretrained(model)
        rounds = [
            (time_imports(), *measure_start(model, RunLayout(scratch / f"run_{i}"), args.flags)) for i in range(args.rounds)
        ]
    imports_s = statistics.median(each[0] for each in rounds)
    marks, cpu = _medians([each[1] for each in rounds]), _medians([each[2] for each in rounds])
    firsts = [each[1]["step trained"] for each in rounds]
    cores = os.cpu_count() or 1
    print(
        json.dumps(
            {
                "benchmark": "startup",
                "first_step_s": marks["step trained"],
                "spread_s": round(max(firsts) - min(firsts), 2),
                "limit_s": round(max(imports_s, sum(cpu.values()) / cores), 2),
                "marks_s": dict(sorted(marks.items(), key=lambda item: item[1])),
                "cpu_s": cpu | {"all": round(sum(cpu.values()), 2)},
                "server_imports_s": round(imports_s, 2),
                "config": {"model": args.model, "rounds": args.rounds, "flags": args.flags},
                "cores": cores,
                "hardware": hardware(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
