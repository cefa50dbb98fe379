"""Supervised fine-tuning, one rank of it: `python -m trivet.trainer.sft @ sft.toml`, alone or under torchrun.

Shares model, step, optimizer, checkpoints and publishing with the RL loop; data and loss are its own. Waits for nothing but
the other ranks.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trivet.algorithms.packing import pack
from trivet.checkpoints.halves import TRAINER
from trivet.config.command import run_command
from trivet.config.trainer import SftConfig
from trivet.lifetime import die_with_parent
from trivet.telemetry import progress
from trivet.trainer.bench import run_bench
from trivet.trainer.distributed import World, open_world
from trivet.trainer.losses.select import cross_entropy
from trivet.trainer.main import set_up_rank
from trivet.trainer.session import Session, open_session
from trivet.trainer.sft_data import load_data, step_indices, to_items
from trivet.trainer.step import train_step
from trivet.wire.events import Train
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)


def main() -> int:
    die_with_parent()
    return run_command(SftConfig, start)


def start(config: SftConfig) -> int:
    with open_world(device=config.device, timeout_s=config.dist_timeout_seconds, num_replicas=config.model.dp_replicate) as world:
        if config.bench is not None:
            run_bench(config, world, loss=cross_entropy, kind="sft")
            return 0
        set_up_rank(config, world, role="sft")
        run(config, world)
    return 0


def run(config: SftConfig, world: World) -> None:
    """Train to max_steps, by default once over the data; publish and commit at the interval and at the end."""
    data = load_data(config.data.name)
    if config.max_steps is None:
        config = config.model_copy(update={"max_steps": -(-len(data) // config.data.batch_size)})
    assert config.max_steps is not None
    with open_session(config, world, loss=cross_entropy, role="sft", keep_recent=0) as session:
        logger.info("data loaded rows=%s steps=%s batch_size=%s", len(data), config.max_steps, config.data.batch_size)
        for step in range(session.from_step + 1, config.max_steps + 1):
            _take_step(session, config, data, Step(step))


def _take_step(session: Session, config: SftConfig, data: Sequence[Mapping[str, Any]], step: Step) -> None:
    with session.timed("step"):
        with session.timed("load_data"):
            indices = step_indices(
                step - session.progress.data_start,
                batch_size=config.data.batch_size,
                num_rows=len(data),
                seed=config.seed,
                does_shuffle=config.data.shuffle,
            )
            items = to_items([data[index] for index in indices], session.exporter.tokenizer)
            num_cut = sum(item.sample.num_tokens > config.model.seq_len for item in items)
            rows = pack(items, seq_len=config.model.seq_len)
        progress.doing(f"training step {step}")
        result = train_step(session.learner, rows, step=step)
        session.progress.step = step
        session.progress.total_tokens += sum(row.num_tokens for row in rows)
        session.progress.total_samples += len(items)
        progress.note(step=step)
        if session.telemetry is not None:
            session.telemetry.write_event(Train(step=step, group_ids=[]))
        if config.ckpt.is_due(step, max_steps=config.max_steps):
            session.publish(step)
            session.save(step, halves=(TRAINER,))
        session.settle()
    epoch = ((step - session.progress.data_start) * config.data.batch_size - 1) // len(data)
    session.report(step, result, rows, extra={"data/epoch": epoch, "data/num_truncated": num_cut})


if __name__ == "__main__":
    sys.exit(main())
