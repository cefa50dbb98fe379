"""Lists the parts of scripts/gpu_check.py: which programs, in which order, for how long, and what of their output is recorded.

The order is by value: an hour on a GPU may be cut off after any of them.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PYTHON = sys.executable
_ROWS = "scripts/bench/gpu_rows.py"
_SMALL = ("--shape", "Qwen3-tiny", "--seq-len", "256")
"""Flags of the rows for a CPU, which computes each in a second."""
_RELOAD_TEST = "tests/integration/test_reload_on_devices.py"
_TRANSFER_TEST = "tests/integration/test_weight_transfer.py"
_MAX_NAMED_TESTS = 30
"""Failed and skipped tests of a part that are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of the machine and its packages that the parts of a check depend on."""

    device: str
    """`cpu` or `cuda`."""
    gpus: tuple[str, ...]
    """Names of the GPUs that torch sees; empty for a check on the CPU."""
    torch: str
    vllm: str | None
    """Version of the build for the device; None when it is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A program that says something about a device."""

    name: str
    command: Sequence[str]
    limit_s: float
    missing: str | None = None
    """Why this machine cannot run it; None when it can."""
    read_result: Callable[[str], Any]
    """Returns what is recorded of the output; None when nothing is found."""
    keeps_result: bool = False
    """True when a failed part's result says more than its last lines."""
    good_codes: tuple[int, ...] = (0,)


def make_parts(machine: Machine, *, scratch: Path, traces: Path) -> list[Part]:
    """Return all parts in their order, with a reason for those that `machine` cannot run.

    Args:
        scratch: an empty directory for what they write.
        traces: the directory of the trace, which stays.
    """
    no_device = "torch sees no CUDA device" if machine.device == "cuda" and not machine.gpus else None
    parts = [_doctor(), *_tests(machine, no_device), *_rows(machine, no_device), _trace(machine, traces, no_device)]
    return [*parts, *_with_server(machine, scratch, no_device)]


def last_json(output: str) -> Any:
    """Return the last line of `output` that is a JSON object."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


def whole_json(output: str) -> Any:
    """Return `output` as JSON."""
    try:
        return json.loads(output)
    except ValueError:
        return None


def pytest_counts(output: str) -> dict[str, Any] | None:
    """Return pytest's last line, and the tests that failed or were skipped."""
    lines = output.splitlines()
    summary = next((line.strip("= ") for line in reversed(lines) if " in " in line and line.strip("= ")[:1].isdigit()), None)
    if summary is None:
        return None
    named = {
        key: [line for line in lines if line.startswith(words)][:_MAX_NAMED_TESTS]
        for key, words in {"failed": ("FAILED ", "ERROR "), "skipped": ("SKIPPED ",)}.items()
    }
    return {"summary": summary} | {key: found for key, found in named.items() if found}


def _doctor() -> Part:
    return Part(
        name="doctor",
        command=[_PYTHON, "-m", "trivet.cli.main", "doctor", "--json"],
        limit_s=120,
        read_result=whole_json,
        good_codes=(0, 1),  # 1: something is missing that a whole run needs, such as vLLM; the findings say what
    )


def _tests(machine: Machine, no_device: str | None) -> list[Part]:
    marks = "gpu and not vllm" if machine.device == "cuda" else "device and not gpu and not vllm and not slow"
    attention = "tests/unit/trainer/attention"
    paths = {"tests-attention": [attention], "tests-trainer": ["tests/unit/trainer", f"--ignore={attention}"]}
    missing = no_device or (None if find_spec("pytest") else "pytest is not installed")
    parts = [_pytest(name, [*words, "-m", marks], limit_s=480, missing=missing) for name, words in paths.items()]
    kinds, no_second_gpu = ("context-parallel", "expert-parallel"), missing or _why_one_gpu(machine)
    files = {kind: f"tests/integration/test_{kind.replace('-', '_')}.py" for kind in kinds}
    return parts + [_pytest(kind, [file, "-m", "gpu"], limit_s=600, missing=no_second_gpu) for kind, file in files.items()]


def _why_one_gpu(machine: Machine) -> str | None:
    """Return why parts for two GPUs cannot run; None where they can."""
    return None if len(machine.gpus) > 1 else f"needs two GPUs, there are {len(machine.gpus)}"


def _pytest(name: str, words: Sequence[str], *, limit_s: float, missing: str | None) -> Part:
    return Part(
        name=name,
        command=[_PYTHON, "-m", "pytest", "-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider", *words],
        limit_s=limit_s,
        missing=missing,
        read_result=pytest_counts,
        keeps_result=True,
    )


def _rows(machine: Machine, no_device: str | None) -> list[Part]:
    """Return the rows of the published table: the cheapest first, and with the levers that decide most."""
    without_ac, without_compile = ("--model.ac", "None"), ("--model.compile", "None")
    keep = ("--model.ac.keep", '["attention"]')  # recomputed attention is the largest part of what checkpointing costs
    chosen: list[tuple[str, str, Sequence[str], float]] = [
        ("row-rl-full-16384", "rl-full-16384", (), 240),
        ("row-rl-full-16384-keep", "rl-full-16384", keep, 240),
        ("row-rl-full-16384-eager", "rl-full-16384", without_compile, 180),
        # The memory that was published for these rows is that of a run without checkpointing.
        ("row-sft-full-8192-no-ac", "sft-full-8192", without_ac, 240),
        ("row-sft-full-16384-no-ac", "sft-full-16384", without_ac, 240),
        ("row-rl-lora-16384", "rl-lora-16384", (), 240),
        ("row-sft-full-8192", "sft-full-8192", (), 240),
        ("row-sft-full-16384", "sft-full-16384", (), 240),
        ("row-rl-lora-4b-16384", "rl-lora-4b-16384", (), 300),
        ("row-rl-full-65536", "rl-full-65536", (), 300),
        ("row-rl-full-65536-keep", "rl-full-65536", keep, 300),
        ("row-rl-lora-65536", "rl-lora-65536", (), 300),
        ("row-rl-lora-4b-65536", "rl-lora-4b-65536", (), 480),
    ]
    small = () if machine.device == "cuda" else _SMALL
    parts: list[Part] = []
    firsts: dict[tuple[str, Sequence[str]], str] = {}
    for name, row, extra, limit_s in chosen:
        # With small shapes rows of other lengths or models are the same measurement.
        first = firsts.setdefault((re.sub(r"-4b|-\d+", "", row), extra), name)
        repeats = f"with small shapes it is the same as {first}" if small and first != name else None
        command = [_PYTHON, _ROWS, "--only", row, *small, *(["--", *extra] if extra else [])]
        parts.append(Part(name=name, command=command, limit_s=limit_s, missing=no_device or repeats, read_result=last_json))
    return parts


def _trace(machine: Machine, traces: Path, no_device: str | None) -> Part:
    small = () if machine.device == "cuda" else _SMALL
    measure = [_PYTHON, _ROWS, "--only", "rl-full-16384", *small, "--", "--trace-path", str(traces)]
    return Part(name="trace", command=measure, limit_s=420, missing=no_device, read_result=last_json)


def _with_server(machine: Machine, scratch: Path, no_device: str | None) -> list[Part]:
    """Return the parts for which vLLM serves."""
    no_vllm = no_device or (None if machine.vllm else f"no vLLM for {machine.device} is installed")
    no_example = no_vllm or (None if find_spec("reverse_text") else "the environment reverse-text is not installed")
    marks = "gpu" if machine.device == "cuda" else "not gpu"
    quickstart, flat = scratch / "quickstart", scratch / "flat"
    # CUDA graphs, which the quickstart leaves out; on a CPU they do not exist, and compiling takes minutes.
    graphs = ["--inference.model.enforce-eager", "false"] if machine.device == "cuda" else []
    record = [_PYTHON, "scripts/run_record.py"]
    run = ["@", "configs/quickstart/rl.toml", "--model.name", str(scratch / "tiny"), "--output-dir", str(flat)]
    run += ["--max-steps", "5", "--trainer.optim.lr", "0"]  # nothing is learnt, so that what differs is the engines' arithmetic
    # The engine sleeps and wakes in every step. One that woke with other weights would show a mismatch of log-probabilities.
    asleep = [
        "@",
        "configs/quickstart/rl.toml",
        "--model.name",
        str(scratch / "sleeper"),
        "--output-dir",
        str(scratch / "sleep"),
    ]
    asleep += ["--max-steps", "3", "--max-async-level", "0", "--inference.sleep-while-training"]
    asleep += ["--inference-gpu-ids", "[0]", "--trainer-gpu-ids", "[0]"]
    no_sleep = "a server on the CPU has no GPU memory to free" if machine.device == "cpu" else no_example
    tiny_model = [_PYTHON, "-m", "trivet.examples.tiny_model"]
    return [
        _pytest("reload", [_RELOAD_TEST, "-m", marks, "-k", "one_engine"], limit_s=600, missing=no_vllm),
        _chain(
            "quickstart",
            [
                [_PYTHON, "-m", "trivet.cli.main", "quickstart", "--output-dir", str(quickstart)],
                [*record, str(quickstart / "run")],
            ],
            limit_s=1200,
            missing=no_example,
        ),
        _chain(
            "mismatch",
            [
                [*tiny_model, str(scratch / "tiny"), "--hidden-size", "256", "--layers", "4"],
                [_PYTHON, "-m", "trivet.launcher.commands.rl", *run, *graphs],
                [*record, str(flat)],
            ],
            limit_s=600,
            missing=no_example,
        ),
        _chain(
            "sleep",
            [
                [*tiny_model, str(scratch / "sleeper"), "--hidden-size", "256", "--layers", "4"],
                [_PYTHON, "-m", "trivet.launcher.commands.rl", *asleep],
                [*record, str(scratch / "sleep")],
            ],
            limit_s=600,
            missing=no_sleep,
        ),
        Part(
            name="publish",
            command=[_PYTHON, "scripts/bench/weights.py"],
            limit_s=400,
            missing=no_vllm,
            read_result=last_json,
        ),
        _pytest(
            "transfer",
            [_TRANSFER_TEST, "-m", "gpu", "-k", "nccl"],
            limit_s=600,
            missing=no_vllm or _why_one_gpu(machine),
        ),
        _pytest(
            "tensor-parallel",
            [_RELOAD_TEST, "-m", marks, "-k", "two_gpus"],
            limit_s=600,
            missing=no_vllm or _why_one_gpu(machine),
        ),
    ]


def _chain(name: str, commands: Sequence[Sequence[str]], *, limit_s: float, missing: str | None) -> Part:
    """Return a part of several commands, of which the last prints the result."""
    words = ["bash", "-c", " && ".join(shlex.join(command) for command in commands)]
    return Part(name=name, command=words, limit_s=limit_s, missing=missing, read_result=last_json)
