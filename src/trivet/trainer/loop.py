"""The trainer's loop: receive batch n, take step n, publish policy n, commit checkpoint n if its orchestrator part exists.

     orchestrator                    every rank                         threads, beside the next step
    +---------------+   batch n    +-----------------------------+    +--------------------------------+
    | fills batch n | -----------> | receive, check, train_step, | -> | write weights/step_n (rank 0), |
    |               |              | publish, save, report       |    | write and commit checkpoint n  |
    +---------------+              +-----------------------------+    +--------------------------------+
            ^                         ^                                              |
            |                         +---- step n+1 counts: policy n is readable ---+
            +------------------- rollouts of later batches: policy n is readable ----+

consumes: batches from the orchestrator, in order, one a step
produces: weights/step_n, checkpoints/step_n, metrics and events
waits for: batch n (rank 0, deadline rollout_transport.timeout_s); the other ranks (dist_timeout_seconds); the files of policy
    n-1 before step n counts; the checkpoint before, in `save`
unblocked by: the orchestrator, which sends batch n once it has enough groups, and acts on each published policy; the disk
"""

import logging
from collections.abc import Callable, Sequence

from trivet.algorithms.probe import convert_dtype
from trivet.checkpoints.commit import PARTS, TRAINER
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import BatchError, WeightsError
from trivet.faults import reach
from trivet.key_names import key_name
from trivet.telemetry import process_report
from trivet.trainer.failures import naming_last_weights
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.model.reference import open_reference
from trivet.trainer.open_session import open_session
from trivet.trainer.probe import require_agreement, require_restored, split_samples
from trivet.trainer.ranks.world import World, broadcast_bytes
from trivet.trainer.session import Session
from trivet.trainer.step import train_step
from trivet.transport.messages import BatchReceiver
from trivet.weights.manifest import read_manifest, verify
from trivet.wire.batches import Batch, BatchPurpose, MicroBatch
from trivet.wire.codec import decode, encode
from trivet.wire.events import ProbeCompared, Train
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


def run(config: TrainerConfig, world: World, *, make_receiver: Callable[[Step], BatchReceiver]) -> None:
    """Train to max_steps, or without end if max_steps is not set.

    Args:
        make_receiver: called on rank 0 with the step that the run starts from, after the leftovers of an earlier attempt are
            removed. Only then may the orchestrator be answered, because it writes checkpoint parts after the first answer.
    """
    loss = make_policy_loss(config.loss)
    reference_interval = config.loss.reference_update_interval if config.loss.beta else None
    with open_session(
        config, world, loss=loss, role="trainer", keep_recent=config.max_async_level, reference_interval=reference_interval
    ) as session:
        session.learner.reference = open_reference(
            config.loss,
            session.learner.model,
            config=config.model,
            layout=session.layout,
            from_step=session.from_step,
            world=world,
        )
        session.release_memory()  # a server that kept running may need the memory that loading has used here
        if session.from_step:
            _continue_policy(session, world)
        receiver = make_receiver(session.from_step) if world.is_main else None
        try:
            _receive_probe(session, config, receiver)
            session.times.clear()  # time spent before the first step belongs to no step
            step = Step(session.from_step + 1)
            while config.max_steps is None or step <= config.max_steps:
                if not _take_step(session, config, receiver, step):
                    break
                step = Step(step + 1)
        finally:
            if receiver is not None:
                receiver.close()


def _continue_policy(session: Session, world: World) -> None:
    """Compare the restored model with the policy published at its step, or publish it again if its files fail. Collective."""
    directory = session.layout.weights_step(session.from_step)
    verdict: bytes | None = None  # rank 0 reads the files and broadcasts its verdict
    if world.is_main:
        try:
            verify(directory)
            verdict = b"whole"
        except WeightsError as exc:
            logger.info("publishing the policy of step %s again: %s", session.from_step, exc)
            verdict = b"damaged"
    if broadcast_bytes(world, verdict) == b"damaged":
        session.publish(session.from_step)
        session.await_policy()
        return
    published = read_manifest(directory).probe
    session.probe_samples = published.token_ids if published is not None else []
    if (probe := session.score_probe()) is not None:
        require_restored(probe, published)


def receive(world: World, receiver: BatchReceiver | None, step: Step) -> Batch:
    """Return the batch of `step` on every rank. Rank 0 has the receiver, waits for the batch and broadcasts it. Collective."""
    if receiver is None:
        while not (data := broadcast_bytes(world, None)):  # rank 0 broadcasts no bytes while it waits (`extend_wait_of_ranks`)
            pass
        return decode(data, Batch)
    batch = receiver.receive(step)
    if world.size > 1:
        broadcast_bytes(world, encode(batch))
    return batch


def extend_wait_of_ranks(world: World) -> None:
    """Restart the timeout of the other ranks. Rank 0 calls it while it waits for a batch in `receive`.

    A rank that receives nothing within the timeout of its group treats the connection as broken and ends.
    """
    broadcast_bytes(world, b"")


def use_experts(rows: Sequence[MicroBatch], config: TrainerConfig) -> None:
    """Drop the experts that the servers returned with `rows`, unless `trainer.router_replay` is set."""
    if not config.router_replay:
        for row in rows:
            row.experts_S = []


def check_batch(
    batch: Batch, *, seq_len: int, vocab_size: int, needs_teacher: bool = False, needs_experts: bool = False
) -> None:
    """Refuse a batch that the model cannot be trained on."""
    for row in batch.micro_batches:
        if needs_teacher and row.teacher_logprobs_T is None:
            raise BatchError(
                f"batch {batch.step} has no teacher log-probabilities, and trainer.loss.teacher_tau is above 0; set "
                "orchestrator.teacher_model, or teacher_tau = 0"
            )
        if needs_experts and (not row.experts_S or None in row.experts_S):
            raise BatchError(
                f"batch {batch.step} has samples without the experts that computed them, and trainer.router_replay is set; start "
                "the servers with inference.return_routed_experts = true (a streamed answer has no experts), or set "
                "trainer.router_replay = false"
            )
        if row.num_tokens > seq_len:
            raise BatchError(
                f"batch {batch.step} has a row of {row.num_tokens} tokens, {key_name('trainer.model.seq_len')} is {seq_len}; "
                f"{key_name('orchestrator.seq_len')} must not be larger"
            )
        if row.num_tokens and not 0 <= row.token_ids_T.min() <= row.token_ids_T.max() < vocab_size:
            raise BatchError(
                f"batch {batch.step} holds token {row.token_ids_T.max()}, the trainer's model has {vocab_size} tokens; "
                "trainer, orchestrator and inference must use the same model.name"
            )


def _receive_probe(session: Session, config: TrainerConfig, receiver: BatchReceiver | None) -> None:
    """Compare the log-probabilities of the start policy with those that each server computed for the probe. Collective.

    Before the first batch to train, the orchestrator sends a batch with one row for each server. If it has no row, nothing is
    compared.
    """
    process_report.begin_waiting("the probe", on="orchestrator")
    batch = receive(session.world, receiver, session.from_step)
    process_report.begin("comparing the start policy with the inference servers")
    assert batch.purpose is BatchPurpose.PROBE, f"batch {batch.step} comes before the first to train"
    check_batch(batch, seq_len=config.model.seq_len, vocab_size=session.learner.model.embedding.num_embeddings)
    if not batch.micro_batches:
        return
    session.probe_samples = split_samples(batch.micro_batches[0])
    if (probe := session.score_probe()) is not None:
        dtype = convert_dtype(batch.served_dtype or probe.dtype)
        result = require_agreement(probe, batch.micro_batches, dtype=dtype)
        logger.info("probe mismatch=%.3g limit=%g tokens=%s", result.mismatch, result.limit, probe.num_scored)
        if session.telemetry is not None:
            session.telemetry.write_event(
                ProbeCompared(
                    version=PolicyVersion(session.from_step),
                    mismatch=result.mismatch,
                    limit=result.limit,
                    num_servers=len(batch.micro_batches),
                )
            )


def _take_step(session: Session, config: TrainerConfig, receiver: BatchReceiver | None, step: Step) -> bool:
    """Receive a batch, train on it, publish the policy and save; return False if a message ends the run instead. Collective."""
    with session.timed("step"):
        if config.max_async_level == 0:
            session.await_policy()  # the batch needs this policy: if it cannot be written, fail here instead of waiting
        with session.timed("wait_for_batch"), process_report.waiting(f"batch {step}", on="orchestrator"):
            batch = receive(session.world, receiver, step)
        session.raise_failure()
        if batch.purpose in (BatchPurpose.PREEMPT, BatchPurpose.END):
            last_step = Step(step - 1)
            session.ending = "preempted" if batch.purpose is BatchPurpose.PREEMPT else "exhausted"
            logger.info("%s after step=%s commits=%s", session.ending, last_step, batch.has_orchestrator_part)
            process_report.begin(f"committing step {last_step}")
            if batch.has_orchestrator_part:
                session.save(last_step, parts=PARTS)
            return False
        process_report.begin(f"training step {step}")
        with session.failing_together(), naming_last_weights(session.layout, await_policy=session.await_policy):
            check_batch(
                batch,
                seq_len=config.model.seq_len,
                vocab_size=session.learner.model.embedding.num_embeddings,
                needs_teacher=config.loss.needs_teacher,
                needs_experts=config.router_replay,
            )
            use_experts(batch.micro_batches, config)
            reach("optimizer_step.before", step=step)
            result = train_step(session.learner, batch.micro_batches, step=step)
            proximal = result.logprobs
            for _ in range(1, config.num_iterations):
                result = train_step(session.learner, batch.micro_batches, step=step, proximal=proximal)
        reach("optimizer_step.after", step=step)
        session.progress.step = step
        session.progress.total_tokens += batch.num_tokens
        session.progress.total_samples += batch.num_rollouts
        session.await_policy()  # the history lists the events of one step before those of the next
        if session.telemetry is not None:
            session.telemetry.write_event(Train(step=step, group_ids=batch.group_ids))
        session.choose_probe(batch.micro_batches)
        session.publish(step)
        reference, interval = session.learner.reference, config.loss.reference_update_interval
        if reference is not None and interval is not None and step % interval == 0:
            reference.follow(session.learner.model)
            logger.info("reference policy version=%s", step)
        if config.data.replay is None and config.data.fake is None:
            parts = PARTS if batch.has_orchestrator_part else ()
        else:  # no orchestrator decides which steps are saved, so `ckpt.interval` does
            parts = (TRAINER,) if config.ckpt.is_due(step, max_steps=config.max_steps) else ()
        if parts:
            session.save(step, parts=parts)
        session.settle()
    process_report.set_numbers(step=step)
    session.report(step, result, batch.micro_batches)
    return True
