"""Runs one rank of supervised fine-tuning: `python -m trivet.trainer.sft.main @ sft.toml`, alone or with others.

Shares model, step, optimizer, checkpoints and publishing with the RL loop; data and loss are its own. It waits only for the other
ranks.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from trivet.checkpoints.parts import TRAINER
from trivet.config.command import run_command
from trivet.config.schema.sft import SftConfig
from trivet.errors import BatchError
from trivet.faults import arm, reach
from trivet.process.signals import Interrupts
from trivet.telemetry import process_report
from trivet.trainer.failures import naming_last_weights
from trivet.trainer.losses.select import cross_entropy
from trivet.trainer.main import set_up_rank
from trivet.trainer.measurement.bench import run_bench
from trivet.trainer.model.export import load_tokenizer
from trivet.trainer.open_session import open_session
from trivet.trainer.ranks.world import World, gather_bytes, open_world
from trivet.trainer.session import Session
from trivet.trainer.sft.batches import Batches, make_batch, open_batches
from trivet.trainer.sft.validation import Validation, open_validation
from trivet.trainer.step import train_step
from trivet.wire.batches import MicroBatch
from trivet.wire.events import Train
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)


def main() -> int:
    """Run one rank from the command line; return its exit code."""
    return run_command(SftConfig, start)


def start(config: SftConfig) -> int:
    """Join the other ranks and train, or measure with `--bench`; return the exit code."""
    with open_world(
        device=config.device,
        timeout_s=config.dist_timeout_seconds,
        num_replicas=config.model.dp_replicate,
        gpu_memory_share=config.gpu_memory_utilization,
    ) as world:
        if config.bench is not None:
            run_bench(config, world, loss=cross_entropy, kind="sft")
            return 0
        set_up_rank(config, world, role="sft")
        arm(config.faults.schedule, rank=world.rank)
        return run(config, world)


def run(config: SftConfig, world: World) -> int:
    """Train to max_steps, by default one epoch; publish and commit at the interval and at the end.

    Returns:
        The exit code: 128 + N when signal N, SIGTERM or SIGHUP, came, after the step was finished and committed.
    """
    process_report.begin("reading the data")
    tokenizer = load_tokenizer(config)
    batches = open_batches(config, tokenizer, vocab_size=len(tokenizer))
    validation = open_validation(config, tokenizer)
    if config.max_steps is None:
        config = config.model_copy(update={"max_steps": batches.num_steps})
    assert config.max_steps is not None
    data = {"data": batches.record()} | ({"val.data": validation.record()} if validation is not None else {})
    with open_session(config, world, loss=cross_entropy, role="sft", keep_recent=0, data=data) as session:
        logger.info(
            "data loaded steps=%s steps_per_epoch=%s batch_size=%s", config.max_steps, batches.num_steps, config.data.batch_size
        )
        if validation is not None:
            _require_known_tokens(validation.rows, session, "val.data")
        if session.from_step == 0 and validation is not None and validation.is_due(0, is_last=False):
            process_report.begin("measuring the held-out loss")
            values = validation.measure(session.learner.model, world, step=Step(0))
            if session.telemetry is not None:
                session.telemetry.write_step(0, values)
        with Interrupts(without={signal.SIGINT}) as interrupts:  # Ctrl-C ends it at once
            for step in range(session.from_step + 1, config.max_steps + 1):
                with session.failing_together():
                    _take_step(session, config, batches, validation, Step(step))
                # The ranks get a signal at different moments: what one has by now counts for all.
                asked = max(number for [number] in gather_bytes(world, bytes([interrupts.first or 0])))
                if asked and step < config.max_steps:
                    _end_early(session, config, Step(step))
                    return 128 + asked
    return 0


def _end_early(session: Session, config: SftConfig, step: Step) -> None:
    """Commit a step, unless that was due anyway."""
    logger.info("preempted after step=%s", step)
    process_report.begin(f"committing step {step}")
    if not config.ckpt.is_due(step, max_steps=config.max_steps):
        session.publish(step)
        session.save(step, parts=(TRAINER,))
    session.ending = "preempted"


def _take_step(session: Session, config: SftConfig, batches: Batches, validation: Validation | None, step: Step) -> None:
    data_step = step - session.progress.data_start
    with session.timed("step"):
        with session.timed("load_data"):
            batch = make_batch(batches.items(data_step), config)
            _require_known_tokens(batch.rows, session, f"data, at step {step},")
        process_report.begin(f"training step {step}")
        reach("optimizer_step.before", step=step)
        with naming_last_weights(session.layout, await_policy=session.await_policy):
            result = train_step(session.learner, batch.rows, step=step)
        reach("optimizer_step.after", step=step)
        session.progress.step = step
        session.progress.total_tokens += sum(row.num_tokens for row in batch.rows)
        session.progress.total_samples += batch.num_samples
        process_report.set_numbers(step=step)
        session.await_policy()  # the history lists the events of one step before those of the next
        if session.telemetry is not None:
            session.telemetry.write_event(Train(step=step, group_ids=[]))
        session.choose_probe(batch.rows)
        if config.ckpt.is_due(step, max_steps=config.max_steps):
            session.publish(step)
            session.save(step, parts=(TRAINER,))
        session.settle()
    extra = {
        "data/epoch": batches.epoch(data_step),
        "data/num_truncated": batch.num_truncated,
        "data/num_empty": batch.num_empty,
    }
    if validation is not None and validation.is_due(step, is_last=step == config.max_steps):
        process_report.begin(f"measuring the held-out loss after step {step}")
        with session.timed("val"):
            extra |= validation.measure(session.learner.model, session.world, step=step)
    session.report(step, result, batch.rows, extra=extra)


def _require_known_tokens(rows: Sequence[MicroBatch], session: Session, data: str) -> None:
    """Refuse conversations with a token that the tokenizer has for pictures or sounds, and a model of text has no row for."""
    num_rows = session.learner.model.embedding.num_embeddings
    if (highest := max(int(row.token_ids_T.max()) for row in rows)) >= num_rows:
        raise BatchError(
            f"a conversation of {data} holds token {highest}, and the embedding of model.name has {num_rows} tokens; remove the "
            "text that makes this token"
        )


if __name__ == "__main__":
    sys.exit(main())
