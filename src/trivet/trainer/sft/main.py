"""Runs one rank of supervised fine-tuning: `python -m trivet.trainer.sft.main @ sft.toml`, alone or with others.

It shares model, step, optimizer, checkpoints and publishing with the RL loop, and has its own data, loss and validation. It waits
only for the other ranks.
"""

import hashlib
import logging
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from trivet.algorithms.packing import pack
from trivet.checkpoints.commit import TRAINER
from trivet.checkpoints.settings import DataRecord
from trivet.config.command import run_command
from trivet.config.schema.sft import SftConfig
from trivet.conversations.mixture import open_data
from trivet.errors import BatchError, ConfigError, Diverged
from trivet.faults import arm, reach
from trivet.process.signals import Interrupts
from trivet.telemetry import process_report
from trivet.trainer.failures import naming_last_weights
from trivet.trainer.losses.formulas import cross_entropy
from trivet.trainer.main import set_up_rank
from trivet.trainer.measurement.bench import run_bench
from trivet.trainer.model.export import load_tokenizer
from trivet.trainer.model.policy_model import PolicyModel, scoring
from trivet.trainer.open_session import open_session
from trivet.trainer.ranks.world import World, gather_bytes, open_world, sum_over_ranks
from trivet.trainer.rows import plan_rows
from trivet.trainer.session import Session
from trivet.trainer.sft.batches import Batches, to_items
from trivet.trainer.step import train_step
from trivet.wire.batches import MicroBatch
from trivet.wire.codec import encode
from trivet.wire.events import Train
from trivet.wire.versions import Step

logger = logging.getLogger(__name__)

ROWS_PER_RANK = 16
"""Held-out rows on the device at one time: all of them may not fit into its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Measures the loss of held-out rows."""

    rows: Sequence[MicroBatch]

    def record(self) -> DataRecord:
        """Return the number and the digest of the rows. A resume compares them with those of the checkpoint."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(encode(row))
        return DataRecord(num_records=len(self.rows), digest=digest.hexdigest())

    def measure(self, model: PolicyModel, world: World, *, step: Step) -> dict[str, float]:
        """Return the mean loss over all loss tokens (`val/loss`, nats) and its exponential as metrics. Collective."""
        totals = torch.zeros(2, dtype=torch.float64, device=world.device)
        size = ROWS_PER_RANK * world.num_row_groups
        with scoring(model):
            for start in range(0, len(self.rows), size):
                rows = self.rows[start : start + size]
                num_groups = world.num_row_groups
                plan = plan_rows(rows, num_ranks=num_groups, shares_prefixes=model.shares_prefixes, packs=model.packs)
                for row in plan.take(world.row_group, device=world.device):
                    logprobs_N = model(row).logprobs_N
                    if not row.is_dummy and world.reports_rows:
                        totals[0] -= logprobs_N.double().sum()
                        totals[1] += len(logprobs_N)
        total, count = sum_over_ranks(world, totals).tolist()
        loss = total / count
        if not math.isfinite(loss):
            raise Diverged(f"the held-out loss after step {step} is {loss}; lower optim.lr, or look at val.data")
        logger.info("held-out loss step=%s loss=%.4f tokens=%d", step, loss, count)
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0)), "val/num_tokens": count}


def open_validation(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> Validation | None:
    """Read the held-out data that `config.val` names; return None when nothing is held out."""
    if config.val is None:
        return None
    seq_len = config.model.seq_len
    data = open_data(config.val.data, seed=config.seed, key="val.data")
    items = to_items(data, range(len(data)), tokenizer, loss_mask=config.val.data.loss_mask)
    rows = pack(items, seq_len=seq_len)
    if not rows:
        raise ConfigError(
            f"val.data.name = {config.val.data.name!r} has no token to measure within model.seq_len ({seq_len}): look at "
            "val.data.loss_mask and at the roles in the data"
        )
    num_cut = sum(item.sample.num_tokens > seq_len for item in items)
    logger.info("held-out data loaded conversations=%s truncated=%s", len(items), num_cut)
    return Validation(rows=rows)


def main() -> int:
    """Run one rank from the command line; return its exit code."""
    return run_command(SftConfig, start)


def start(config: SftConfig) -> int:
    """Join the other ranks and train, or measure with `--bench`; return the exit code."""
    with open_world(
        device=config.device,
        timeout_s=config.dist_timeout_seconds,
        num_replicas=config.model.dp_replicate,
        context_size=config.model.cp,
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
    batches = Batches.open(config, tokenizer)
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
        if session.from_step == 0 and config.val is not None and validation is not None and config.val.eval_on_start:
            process_report.begin("measuring the held-out loss")
            values = validation.measure(session.learner.model, world, step=Step(0))
            if session.telemetry is not None:
                session.telemetry.write_step(0, values)
        with Interrupts(without={signal.SIGINT}) as interrupts:  # Ctrl-C ends it at once
            for step in range(session.from_step + 1, config.max_steps + 1):
                with session.failing_together():
                    _take_step(session, config, batches, validation, Step(step))
                # Ranks get a signal at different moments. One that any rank has by now counts for all of them; 0: there is none.
                signal_number = max(number for [number] in gather_bytes(world, bytes([interrupts.first or 0])))
                if signal_number and step < config.max_steps:
                    logger.info("preempted after step=%s", step)
                    process_report.begin(f"committing step {step}")
                    if not config.ckpt.is_due(step, max_steps=config.max_steps):
                        session.publish(Step(step))
                        session.save(Step(step), parts=(TRAINER,))
                    session.ending = "preempted"
                    return 128 + signal_number
    return 0


def _take_step(session: Session, config: SftConfig, batches: Batches, validation: Validation | None, step: Step) -> None:
    data_step = step - session.progress.data_start
    with session.timed("step"):
        with session.timed("load_data"):
            batch = batches.make(data_step)
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
    if config.val is not None and validation is not None and (step % config.val.interval == 0 or step == config.max_steps):
        process_report.begin(f"measuring the held-out loss after step {step}")
        with session.timed("val"):
            extra |= validation.measure(session.learner.model, session.world, step=step)
    session.report(step, result, batch.rows, extra=extra)


def _require_known_tokens(rows: Sequence[MicroBatch], session: Session, data: str) -> None:
    """Refuse conversations with a token, such as one for pictures or sounds, for which the model has no embedding.

    Args:
        data: the data set and the step, for the message.
    """
    num_tokens = session.learner.model.embedding.num_embeddings
    highest = max(int(row.token_ids_T.max()) for row in rows)
    if highest >= num_tokens:
        raise BatchError(
            f"a conversation of {data} holds token {highest}, and the embedding of model.name has {num_tokens} tokens; remove the "
            "text that makes this token"
        )


if __name__ == "__main__":
    sys.exit(main())
