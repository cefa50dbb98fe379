"""Measures a step: `uv run trainer --bench`, `uv run sft --bench`, `uv run rl --bench`. Called by a rank's entry point.

It runs the same steps as training, on made-up rows. It must never write into the output directory, because a run may use it.
"""

import importlib.metadata
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from trivet.config.schema.trainer import TrainerConfig, TrainingConfig
from trivet.dependencies import own_version
from trivet.errors import ConfigError
from trivet.storage.durable import replace_file
from trivet.telemetry.logs import setup_logging
from trivet.trainer.losses.terms import Loss
from trivet.trainer.measurement.fake import fake_rows
from trivet.trainer.measurement.performance import (
    measure_seconds,
    measured_flops,
    model_cost,
    peak_flops,
    peak_memory_gib,
    total_memory_gib,
)
from trivet.trainer.measurement.profiling import Profiler
from trivet.trainer.model.policy_model import torch_dtype
from trivet.trainer.model.reference import Reference
from trivet.trainer.open_session import make_learner
from trivet.trainer.ranks.world import World, barrier
from trivet.trainer.step import StepResult, train_step
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

Kind = Literal["rl", "sft"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The spread of a quantity over all steps but the first, which is slower."""

    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Spread":
        """Describe `values`, one for each step."""
        array = np.asarray(values, dtype=np.float64)
        return cls(mean=float(array.mean()), std=float(array.std()), min=float(array.min()), max=float(array.max()))

    @classmethod
    def from_rate(cls, amount: float, seconds: Sequence[float]) -> "Spread":
        """Describe the rate of `amount` per second, for steps of these `seconds`. The mean is total amount by total time."""
        spread = cls.from_values([amount / step_s for step_s in seconds])
        return msgspec.structs.replace(spread, mean=amount * len(seconds) / sum(seconds))


class PeakMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of the main rank: of its GPU's allocator, or on a CPU of its process. `pct` is of the device's memory."""

    gib: float
    pct: float


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file of bench.output_json."""

    kind: Kind
    mfu: Spread
    """Percent of the peak, by the formula of prime-rl's figures (`ModelCost.reference_flops`)."""
    model_mfu: Spread
    """Percent of the peak, by the operations that the model needs (`ModelCost.flops`)."""
    throughput: Spread
    """Tokens of the batch per second, over all ranks. A token that samples share counts once for each of them."""
    computed_throughput: Spread
    """Tokens that were computed per second, over all ranks. A token that samples share counts once if it is computed once."""
    step_time: Spread
    """Seconds of an optimizer step, from its rows to its update."""
    peak_memory: PeakMemory
    step_times: list[float]
    """Seconds of every step, including the first, which the spreads leave out."""
    tokens_per_step: int
    """Tokens of a batch."""
    computed_tokens_per_step: int
    """Computed tokens of a batch: fewer where samples share prompts."""
    num_ranks: int
    num_parameters: int
    num_trained_parameters: int
    peak_flops: float
    """Per second and rank."""
    peak_flops_source: Literal["table", "measured"]
    """`measured`: the rate of matrix products on this device in the dtype of the computation, not a data sheet's."""
    device: str
    versions: dict[str, str]
    config: dict[str, Any]


def run_bench(config: TrainingConfig, world: World, *, loss: Loss, kind: Kind) -> BenchReport:
    """Measure; on rank 0 print a table and write `bench.output_json`. Collective."""
    from transformers.utils.logging import disable_progress_bar

    assert config.bench is not None
    disable_progress_bar()
    if world.is_main and config.bench.output_json is not None:
        require_folder(config.bench.output_json)
    level = config.log.level if world.is_main else "warning"
    setup_logging(f"bench.{world.rank}", level=level, as_json=config.log.json_logging)
    report = measure(config, world, loss=loss, kind=kind)
    if world.is_main:
        Console().print(_table(config, report))
        if config.bench.output_json is not None:
            replace_file(config.bench.output_json, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return report


def require_folder(output_json: Path) -> None:
    """Make the report's folder where it is missing; refuse one that cannot be written before anything is measured."""
    folder = output_json.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"bench.output_json ({output_json}) cannot be written: {exc.strerror}; choose another") from exc
    if output_json.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"bench.output_json ({output_json}) is a directory or in one that cannot be written; choose another")


def measure(config: TrainingConfig, world: World, *, loss: Loss, kind: Kind) -> BenchReport:
    """Time every step, and report this rank's measurements. Collective."""
    assert config.bench is not None
    torch.manual_seed(config.seed)
    profiler = Profiler(config, world)
    learner = make_learner(config, world, loss=loss, max_steps=config.bench.num_steps)
    model = learner.model
    if isinstance(config, TrainerConfig) and config.loss.beta:
        learner.reference = Reference(model)
    has_teacher = isinstance(config, TrainerConfig) and config.loss.needs_teacher
    seconds: list[float] = []
    results: list[StepResult] = []
    num_tokens = 0
    for step in range(1, config.bench.num_steps + 1):
        rows = fake_rows(
            step,
            seed=config.seed,
            seq_len=config.model.seq_len,
            vocab_size=model.embedding.num_embeddings,
            num_rows=world.size * config.bench.rows_per_rank,
            prompt_len=config.bench.prompt_len,
            answer_len=config.bench.answer_len,
            group_size=config.bench.group_size,
        )
        for row in rows:
            row.teacher_logprobs_T = row.logprobs_T if has_teacher else None
        num_tokens = sum(row.num_tokens for row in rows)
        barrier(world)
        seconds.append(measure_seconds(lambda: results.append(train_step(learner, rows, step=Step(step))), world.device))  # noqa: B023
        profiler.finish_step(step)
        logger.info("step=%s seconds=%.3f tokens=%s", step, seconds[-1], num_tokens)
    profiler.close()
    table_peak = peak_flops(world.device)
    peak = table_peak or measured_flops(world.device, torch_dtype(config.model.compute_dtype))
    counted_seconds, num_computed = seconds[1:], results[-1].num_computed_tokens
    reference_flops = model_cost(model).reference_flops(num_tokens=num_computed, seq_len=config.model.seq_len)
    gib, is_cuda = peak_memory_gib(world.device), world.device.type == "cuda"
    return BenchReport(
        kind=kind,
        mfu=Spread.from_rate(100 * reference_flops / (peak * world.size), counted_seconds),
        model_mfu=Spread.from_rate(100 * results[-1].flops / (peak * world.size), counted_seconds),
        throughput=Spread.from_rate(num_tokens, counted_seconds),
        computed_throughput=Spread.from_rate(num_computed, counted_seconds),
        step_time=Spread.from_values(counted_seconds),
        peak_memory=PeakMemory(gib=gib, pct=100 * gib / total_memory_gib(world.device)),
        step_times=seconds,
        tokens_per_step=num_tokens,
        computed_tokens_per_step=num_computed,
        num_ranks=world.size,
        num_parameters=model.num_parameters,
        num_trained_parameters=sum(parameter.numel() for parameter in model.trained_parameters),
        peak_flops=peak,
        peak_flops_source="table" if table_peak else "measured",
        device=torch.cuda.get_device_name(world.device) if is_cuda else f"CPU, {torch.get_num_threads()} threads",
        versions={"trivet": own_version()} | {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        config=config.model_dump(mode="json"),
    )


def _table(config: TrainingConfig, report: BenchReport) -> Table:
    adapter = f"adapter of rank {config.model.lora.rank}" if config.model.lora is not None else "all weights"
    memory = report.peak_memory
    table = Table(
        title=f"{report.kind} {config.model.name}, {adapter}, {report.num_ranks} x {report.device}",
        caption=f"{report.tokens_per_step} tokens a step in rows of {config.model.seq_len}, {report.computed_tokens_per_step} of "
        f"them computed; the first of {len(report.step_times)} steps left out; peak memory "
        f"{memory.gib:.1f} GiB ({memory.pct:.0f} %); peak of a rank {report.peak_flops / 1e12:.3g} TFLOP/s, "
        f"{report.peak_flops_source}",
    )
    for column in ("", "mean", "std", "min", "max"):
        table.add_column(column, justify="right" if column else "left")
    for name, spread, form in (
        ("step time, s", report.step_time, ".3f"),
        ("throughput, tokens/s", report.throughput, ",.0f"),
        ("computed tokens/s", report.computed_throughput, ",.0f"),
        ("MFU as prime-rl counts, %", report.mfu, ".1f"),
        ("MFU of the model's operations, %", report.model_mfu, ".1f"),
    ):
        table.add_row(name, *(format(value, form) for value in msgspec.structs.astuple(spread)))
    return table
