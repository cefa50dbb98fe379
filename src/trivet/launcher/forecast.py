"""Forecasts the memory of a run by part and the seconds of a step, before it starts. Used by `--dry-run` and, once, by the run.

The forecast follows from the shapes of the model's tensors, the configuration, and the rate of matrix products on this machine. It
is made for what a step costs at most: every completion has `max_tokens`. What is assumed is said with it. After a few steps the run
compares it with what was measured, and names what was off by more than a quarter.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from trivet.config.layout import RunLayout
from trivet.config.model_files import find_weight_files, read_shapes
from trivet.config.schema.rl import RLConfig
from trivet.launcher.gpu_shares import share_gpus
from trivet.machine import Machine
from trivet.telemetry.metrics import read_metrics

_GIB = float(2**30)
_BYTES = {"float32": 4, "bfloat16": 2}
_MATRIX_ROWS, _MEASURE_S = 768, 0.5
"""Size of the products by which the rate is measured, and for how long: long enough that other programs get their turns too."""
_PROCESS_GIB = 0.6
"""Memory of a process that has imported torch, before it loads a model. Measured with torch 2.13 on a CPU."""
_ACTIVATIONS_PER_TOKEN = (16, 4)
"""Values that a block keeps for each token until its backward pass: of hidden size, and of the size within the MLP."""
_RATE_SHARE = 0.5
"""Share of the rate of plain matrix products that a step reaches."""
_TOKEN_OVERHEAD_S = 0.02
"""Seconds of the engine for each position that it samples in all sequences at once, beside the products, on an idle machine."""
_PROMPT_TOKENS = 128
"""Tokens of a prompt, unless the context leaves fewer."""
_OFF = 1.25
"""Ratio of forecast to fact, or of fact to forecast, from which the run says that the forecast was off."""
FIRST_STEPS = 5
"""The comparison is made after this many steps, without the first, which is slower."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The memory and the seconds of a step that a run is expected to take."""

    trainer_gib: dict[str, float]
    """Memory of a rank of the trainer, by part."""
    server_gib: dict[str, float]
    """Memory of a server, by part; empty without one."""
    seconds: dict[str, float]
    """Seconds of a step, by part; empty if the machine's rate is not measured."""
    assumptions: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes in a model's files that the forecast uses."""

    num_parameters: int
    num_trained: int
    num_product_parameters: int
    """Parameters in the matrix products of one token: without an embedding that is only looked up."""
    hidden: int
    within_mlp: int
    layers: int
    vocabulary: int


def forecast_run(config: RLConfig, machine: Machine) -> Forecast | None:
    """Return the forecast of a run on this machine; None for a run over several nodes, and if the model's files are not here."""
    if config.deployment.is_multi_node or config.trainer.bench is not None or (shape := read_shape(config)) is None:
        return None
    if not machine.gpus or config.trainer.device == "cpu":
        rate, slowdown = measure_rate()
        return make_forecast(config, shape, num_ranks=1, rate=rate, slowdown=slowdown)
    return make_forecast(config, shape, num_ranks=max(1, len(share_gpus(config, machine.gpus).trainer)), rate=None)


def make_forecast(
    config: RLConfig, shape: ModelShape, *, num_ranks: int, rate: float | None, slowdown: float = 1.0
) -> Forecast:
    """Return the forecast of a run.

    Args:
        num_ranks: ranks of the trainer, over which weights, gradients and the optimizer's state are divided.
        rate: operations per second of matrix products on this machine; None if it is unknown, and then there are no seconds.
        slowdown: how many times longer everything takes here than on the same machine without its other programs.
    """
    orchestrator, server = config.orchestrator, config.inference
    context = min(orchestrator.seq_len, (server.model.max_model_len if server is not None else None) or orchestrator.seq_len)
    answer = min(orchestrator.sampling.max_tokens or context, context)
    prompt = max(1, min(_PROMPT_TOKENS, context - answer))
    assumptions = [f"prompts of {prompt} tokens and completions of {answer}, the most that sampling.max_tokens allows"]
    seconds: dict[str, float] = {}
    if rate is None:
        assumptions.append(
            "no seconds: the rate of matrix products is only measured on a CPU; uv run rl --bench measures a GPU"
        )
    else:
        seconds = _forecast_seconds(config, shape, rate=rate, slowdown=slowdown, prompt=prompt, answer=answer)
        assumptions += [
            f"{_RATE_SHARE:.0%} of the {rate / 1e9:,.0f} GFLOP/s of matrix products measured here",
            f"{1000 * _TOKEN_OVERHEAD_S * slowdown:.0f} ms of the server for each sampled position",
            "0 s for the environment: no key says how long it takes",
        ]
        if slowdown > _OFF:
            assumptions.append(f"that other programs go on to slow this machine down, {slowdown:.1f} times")
    server_gib: dict[str, float] = {}
    if server is not None:
        weights = shape.num_parameters * _BYTES.get(str(server.model.dtype), 2) / _GIB
        server_gib = {"weights": weights, "kv cache": server.cpu_kv_cache_gib}
    return Forecast(
        trainer_gib=_forecast_trainer(config, shape, num_ranks=num_ranks, sample=prompt + answer),
        server_gib=server_gib,
        seconds=seconds,
        assumptions=assumptions,
    )


def _forecast_trainer(config: RLConfig, shape: ModelShape, *, num_ranks: int, sample: int) -> dict[str, float]:
    """Return the memory of a rank by part, GiB, for samples of `sample` tokens."""
    trainer, dtype = config.trainer, str(config.trainer.model.compute_dtype)
    row = min(trainer.micro_batch_tokens or trainer.model.seq_len, config.orchestrator.batch_size * sample)
    master = _BYTES[trainer.model.optimization_dtype]
    casts = _BYTES[dtype] if dtype != trainer.model.optimization_dtype else 0
    moments = {"adamw": 2, "muon": 1.5}.get(trainer.optim.type, 1)
    of_hidden, of_mlp = _ACTIVATIONS_PER_TOKEN
    per_token = shape.hidden if trainer.model.ac is not None else of_hidden * shape.hidden + of_mlp * shape.within_mlp
    parts = {
        "weights": shape.num_parameters * (master + casts) / num_ranks,
        "gradients": shape.num_trained * master / num_ranks,
        "optimizer": shape.num_trained * moments * 4 / num_ranks,
        "activations": row * shape.layers * per_token * _BYTES[dtype],
        "logits": 2.0 * min(trainer.model.fused_lm_head_chunk_size, row) * shape.vocabulary * 4,
    }
    return {"process": _PROCESS_GIB, **{name: value / _GIB for name, value in parts.items()}}


def _forecast_seconds(
    config: RLConfig, shape: ModelShape, *, rate: float, slowdown: float, prompt: int, answer: int
) -> dict[str, float]:
    rollouts, flops = config.orchestrator.batch_size, rate * _RATE_SHARE
    trained = rollouts * (prompt / config.orchestrator.rollouts_per_example + answer)  # a group's prompt is computed once
    training = 6.0 * shape.num_product_parameters * trained / flops
    if config.inference is None:  # the servers are not this machine's, or a replay has none
        return {"training": training}
    positions = math.ceil(rollouts / (config.inference.max_num_seqs or rollouts)) * answer
    products = 2.0 * shape.num_product_parameters * rollouts * (prompt + answer) / flops
    return {"generation": products + positions * _TOKEN_OVERHEAD_S * slowdown, "training": training}


def read_shape(config: RLConfig) -> ModelShape | None:
    """Return the shape of the run's model from its files; None if they are not on this machine."""
    directory = Path(config.trainer.model.name)
    try:
        table: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
        files = [file for file in find_weight_files(directory) if file.suffix == ".safetensors"]
        tensors = {name: shape for file in files for name, shape in read_shapes(file).items()}
    except (OSError, ValueError):
        return None
    if not tensors:
        return None
    text: dict[str, Any] = {**table, **(table.get("text_config") or {})}
    sizes = {name: math.prod(shape) for name, shape in tensors.items()}
    has_head = any(name.endswith("lm_head.weight") for name in sizes)
    looked_up = sum(size for name, size in sizes.items() if has_head and name.endswith("embed_tokens.weight"))
    total, lora = sum(sizes.values()), config.trainer.model.lora
    trained = total
    if lora is not None:
        targets = tuple(f"{target}.weight" for target in lora.target_modules)
        trained = sum(lora.rank * sum(shape) for name, shape in tensors.items() if name.endswith(targets) and len(shape) == 2)
    hidden = int(text.get("hidden_size", 0))
    return ModelShape(
        num_parameters=total,
        num_trained=trained,
        num_product_parameters=total - looked_up,
        hidden=hidden,
        within_mlp=int(text.get("intermediate_size") or 4 * hidden),
        layers=int(text.get("num_hidden_layers", 0)),
        vocabulary=int(text.get("vocab_size", 0)),
    )


def measure_rate() -> tuple[float, float]:
    """Measure float32 matrix products on this machine's cores for half a second.

    Returns:
        Operations per second on average, and the ratio of the mean duration of a product to the least: 1 on an idle machine.
    """
    left = np.random.default_rng(0).standard_normal((_MATRIX_ROWS, _MATRIX_ROWS), dtype=np.float32)
    _ = left @ left  # the first product starts the library's threads
    seconds: list[float] = []
    while sum(seconds) < _MEASURE_S:
        started = time.perf_counter()
        _ = left @ left
        seconds.append(time.perf_counter() - started)
    mean = sum(seconds) / len(seconds)
    return 2.0 * _MATRIX_ROWS**3 / mean, mean / min(seconds)


def describe_forecast(found: Forecast, *, available_gib: float | None) -> list[str]:
    """Return the lines that `--dry-run` prints.

    Args:
        available_gib: main memory of this machine, if the whole run uses it; None if parts of it run elsewhere.
    """
    named = {"trainer": found.trainer_gib, "server": found.server_gib}
    lines = [f"{name} {sum(parts.values()):.2f} GiB: {_list(parts, 'GiB')}" for name, parts in named.items() if parts]
    if available_gib is not None:
        total = sum(sum(parts.values()) for parts in named.values())
        fits = "fits" if total + _PROCESS_GIB < available_gib else "does not fit"
        lines.append(f"{total:.2f} GiB {fits} into the {available_gib:.1f} GiB of this machine")
    if found.seconds:
        lines.append(f"{sum(found.seconds.values()):.2f} s a step: {_list(found.seconds, 's')}")
    return [f"forecast: {line}" for line in [*lines, *(f"assumes {text}" for text in found.assumptions)]]


def _list(parts: Mapping[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.2f} {unit}" for name, value in parts.items())


def compare_with_facts(found: Forecast, facts: Mapping[str, float]) -> str:
    """Return one sentence on what was off by more than a quarter; that nothing was, if so.

    Args:
        facts: what `read_facts` returned.
    """
    expected = {"trainer memory, GiB": sum(found.trainer_gib.values()), **{f"{k}, s": v for k, v in found.seconds.items()}}
    if found.seconds:
        expected["step, s"] = sum(found.seconds.values())
    both = {name: (value, facts[name]) for name, value in expected.items() if facts.get(name, 0.0) > 0 and value > 0}
    off = {name: pair for name, pair in both.items() if max(pair) > _OFF * min(pair)}
    if not off:
        return f"forecast: within a quarter of the facts ({', '.join(both) or 'nothing to compare'})"
    described = "; ".join(f"{name}: {forecast:.2f} forecast, {fact:.2f} measured" for name, (forecast, fact) in off.items())
    return f"forecast: off by more than a quarter: {described}"


def read_facts(layout: RunLayout, *, from_step: int) -> dict[str, float] | None:
    """Return what the first steps of this start took; None while there are too few. The medians leave out the first step."""
    rows = {
        role: [row for row in read_metrics(layout.metrics / f"{role}.jsonl").rows if row["step"] > from_step]
        for role in ("trainer", "orchestrator")
    }
    if min(map(len, rows.values())) < FIRST_STEPS:
        return None
    trainer, orchestrator = rows["trainer"][1:FIRST_STEPS], rows["orchestrator"][1:FIRST_STEPS]
    computing = [row.get("time/forward_backward", 0.0) + row.get("time/optimizer", 0.0) for row in trainer]
    return {
        "trainer memory, GiB": max(row.get("perf/peak_memory", 0.0) for row in trainer),
        "generation, s": median(row.get("time/generate_completions", 0.0) for row in orchestrator),
        "training, s": median(computing),
        "step, s": median(row.get("time/step", 0.0) for row in trainer),
    }
