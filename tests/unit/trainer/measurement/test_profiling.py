import gzip
import json

import pytest
import torch

from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError
from trivet.trainer.cpu import Lanes
from trivet.trainer.measurement.profiling import Profiler


def take_steps(profiler: Profiler, count: int) -> None:
    for step in range(1, count + 1):
        (torch.ones(step, 8) @ torch.ones(8, 8)).sum()
        profiler.finish_step(step)
    profiler.close()


def matmul_rows(path) -> list[int]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["args"]["Input Dims"][0][0] for event in events if event.get("name") == "aten::mm"]


def test_the_trace_is_of_the_third_and_fourth_step(tmp_path, world):
    take_steps(Profiler(TrainerConfig(trace_path=tmp_path / "traces"), world), 6)
    assert matmul_rows(tmp_path / "traces" / "trace.rank_0.json.gz") == [3, 4]


def test_the_trace_shows_rows_that_threads_compute_side_by_side(tmp_path, world):
    def compute(row: int) -> None:
        (torch.ones(row, 8) @ torch.ones(8, 8)).sum()

    lanes = Lanes(2)
    lanes.map(compute, [1, 2])
    profiler = Profiler(TrainerConfig(trace_path=tmp_path), world)
    for step in range(1, 5):
        lanes.map(compute, [10 * step, 10 * step + 1])
        profiler.finish_step(step)
    profiler.close()
    assert sorted(matmul_rows(tmp_path / "trace.rank_0.json.gz")) == [30, 31, 40, 41]


def test_a_run_that_ends_early_leaves_the_part_that_was_traced(tmp_path, world):
    take_steps(Profiler(TrainerConfig(trace_path=tmp_path), world), 3)
    assert matmul_rows(tmp_path / "trace.rank_0.json.gz") == [3]


def test_a_run_that_ends_before_the_trace_begins_says_so(tmp_path, world, caplog):
    take_steps(Profiler(TrainerConfig(trace_path=tmp_path), world), 1)
    assert "the run ended before step 3" in caplog.text
    assert not list(tmp_path.iterdir())


def test_snapshots_of_gpu_memory_are_refused_on_the_cpu(tmp_path, world):
    with pytest.raises(ConfigError, match=r"memory_profiler_path .* needs a CUDA device"):
        Profiler(TrainerConfig(memory_profiler_path=tmp_path), world)


def test_without_a_path_nothing_is_written_and_a_step_costs_nothing(tmp_path, world):
    take_steps(Profiler(TrainerConfig(output_dir=tmp_path), world), 6)
    assert not list(tmp_path.iterdir())
