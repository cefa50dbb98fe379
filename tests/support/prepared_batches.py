"""Runs the RL loop of the trainer over batches that are all there from the start."""

from collections.abc import Mapping
from pathlib import Path

from trivet.config.schema.trainer import TrainerConfig
from trivet.trainer.loop import run
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.versions import GroupId, Step


class PreparedBatches:
    """A BatchReceiver that has all its batches from the start."""

    def __init__(self, batches: Mapping[int, Batch]) -> None:
        self.batches = batches
        self.asked: list[Step] = []
        self.is_closed = False

    def receive(self, step: Step) -> Batch:
        self.asked.append(step)
        return self.batches[step]

    def close(self) -> None:
        self.is_closed = True


def make_batch(step: int, rows, purpose: BatchPurpose, *, has_part: bool = False) -> Batch:
    return Batch(
        step=Step(step),
        purpose=purpose,
        micro_batches=rows,
        group_ids=[GroupId(step)],
        num_rollouts=4,
        has_orchestrator_part=has_part,
    )


def make_config(model_dir: Path, output_dir: Path, **changes: object) -> TrainerConfig:
    values = {
        "output_dir": output_dir,
        "max_steps": 6,
        "model": {"name": str(model_dir), "compute_dtype": "float32"},
        "optim": {"lr": 1e-3},
    }
    return TrainerConfig.model_validate(values | changes)


def run_loop(config: TrainerConfig, world, make) -> PreparedBatches:
    made: list[PreparedBatches] = []

    def make_receiver(from_step: Step) -> PreparedBatches:
        made.append(PreparedBatches(make()))
        return made[0]

    run(config, world, make_receiver=make_receiver)
    return made[0]
