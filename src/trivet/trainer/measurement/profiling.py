"""Records the use of time and memory in a few steps, as traces and memory snapshots, one file for each rank.

Owned by a session or a benchmark. It does nothing unless `trace_path` or `memory_profiler_path` is set.
"""

import logging

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from trivet.config.schema.trainer import TrainingConfig
from trivet.errors import ConfigError
from trivet.trainer.ranks.world import World

logger = logging.getLogger(__name__)

_SKIPPED_STEPS, _WARMUP_STEPS, _TRACED_STEPS = 1, 1, 2
"""Steps before the trace (the first step is slow), steps that pay for the profiler's start, and steps in the trace."""
_MAX_EVENTS = 100_000
"""Newest allocations and frees that a memory snapshot contains."""


class Profiler:
    """Writes the trace and the memory snapshots of one rank."""

    def __init__(self, config: TrainingConfig, world: World) -> None:
        """Start the trace if `trace_path` is set, and the record of allocations if `memory_profiler_path` is set."""
        self._rank = world.rank
        self._snapshots = config.memory_profiler_path
        self._trace: profile | None = None
        is_cuda = world.device.type == "cuda"
        if self._snapshots is not None:
            if not is_cuda:
                raise ConfigError(
                    f"memory_profiler_path ({self._snapshots}) needs a CUDA device: snapshots are of its allocator, and this run "
                    "is on the CPU; remove it, and set trace_path, whose trace shows allocations too"
                )
            self._snapshots.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)
        if config.trace_path is not None:
            config.trace_path.mkdir(parents=True, exist_ok=True)
            path = config.trace_path / f"trace.rank_{world.rank}.json.gz"

            def write(trace: profile) -> None:
                trace.export_chrome_trace(str(path))
                self._has_traced = True
                logger.info("trace written file=%s", path)

            self._trace = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
                schedule=schedule(wait=_SKIPPED_STEPS, warmup=_WARMUP_STEPS, active=_TRACED_STEPS, repeat=1),
                on_trace_ready=write,
                record_shapes=True,
                profile_memory=True,
                # The threads of `trainer.cpu.Lanes` may have started before the profiler.
                experimental_config=_ExperimentalConfig(profile_all_threads=not is_cuda),
            )
            self._trace.start()
        self._has_traced = False

    def finish_step(self, step: int) -> None:
        """Write the snapshot of `step` and let the trace continue with the next step. Called after each optimizer step."""
        if self._snapshots is not None:
            torch.cuda.memory._dump_snapshot(str(self._snapshots / f"step_{step}.rank_{self._rank}.pickle"))
        if self._trace is not None and not self._has_traced:
            self._trace.step()

    def close(self) -> None:
        """End the recording; a trace of fewer steps than planned is written too. May be called again."""
        if self._trace is not None:
            if not self._has_traced:
                self._trace.stop()  # it writes what it has
            if not self._has_traced:
                logger.warning(
                    "trace_path: the run ended before step %s of its start, no trace is written",
                    _SKIPPED_STEPS + _WARMUP_STEPS + 1,
                )
            self._trace = None
        if self._snapshots is not None:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._snapshots = None
