"""Runs one rank of the trainer: `python -m trivet.trainer.main @ trainer.toml`, as the only rank or as one of several."""

import os
import sys
from contextlib import nullcontext

import torch

from trivet.config.command import run_command
from trivet.config.layout import BATCH_SUFFIX, RunLayout
from trivet.config.schema.shared import IN_MEMORY
from trivet.config.schema.trainer import TrainerConfig, TrainingConfig
from trivet.faults import arm
from trivet.process.lock import hold_role
from trivet.secret import find_secret
from trivet.step_directories import discard_after
from trivet.telemetry import process_report
from trivet.telemetry.logs import setup_logging
from trivet.trainer.loop import extend_wait_of_ranks, run
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.measurement.bench import run_bench
from trivet.trainer.measurement.fake import FakeReceiver
from trivet.trainer.model.initial_weights import read_config
from trivet.trainer.model.supported import require_model
from trivet.trainer.ranks.world import World, open_world
from trivet.trainer.weight_sender import WeightSender
from trivet.transfer.group import KEY_PURPOSE
from trivet.transport.messages import BatchReceiver
from trivet.transport.recording import RecordingReceiver, ReplayReceiver, recorded_steps
from trivet.transport.zeromq import ZmqReceiver
from trivet.wire.versions import Step


def main() -> int:
    """Run one rank from the command line; return its exit code."""
    return run_command(TrainerConfig, start)


def start(config: TrainerConfig) -> int:
    """Join the other ranks and train, or measure with `--bench`; return the exit code."""
    transport = config.rollout_transport
    with open_world(
        device=config.device,
        timeout_s=config.dist_timeout_seconds,
        wait_timeout_s=transport.timeout_s,
        num_replicas=config.model.dp_replicate,
        context_size=config.model.cp,
        gpu_memory_share=config.gpu_memory_utilization,
    ) as world:
        if config.bench is not None:
            run_bench(config, world, loss=make_policy_loss(config.loss), kind="rl")
            return 0
        set_up_rank(config, world, role="trainer")
        arm(config.faults.schedule, rank=world.rank)
        lock = RunLayout(config.output_dir).role_lock("trainer")
        with hold_role(lock, is_over_nodes=transport.is_between_machines) if world.is_main else nullcontext():
            if config.data.replay is not None and config.max_steps is None:
                steps = recorded_steps(RunLayout(config.data.replay))
                config = config.model_copy(update={"max_steps": max(steps, default=None)})
            run(config, world, make_receiver=lambda from_step: open_receiver(config, from_step, world))
    return 0


def open_receiver(config: TrainerConfig, from_step: Step, world: World) -> BatchReceiver:
    """Open the source of the batches after `from_step`: a recorded run, fake batches, or the orchestrator."""
    if config.data.replay is not None:
        return ReplayReceiver(config.data.replay, from_step=from_step)
    if config.data.fake is not None:
        require_model(config.model.name)
        return FakeReceiver(
            config=config.data.fake,
            seed=config.seed,
            seq_len=config.model.seq_len,
            vocab_size=int(read_config(config.model).get_text_config().vocab_size),
            from_step=from_step,
        )
    layout = RunLayout(config.output_dir)
    secret = find_secret(layout, environ=os.environ)
    transfers = {}
    if (transport := config.weights.transport) in IN_MEMORY:
        device = world.device if transport == "nccl" else torch.device("cpu")
        transfers = {"on_transfer": WeightSender(layout, device=device, key=secret.derive(KEY_PURPOSE)).begin}
    receiver = ZmqReceiver(
        config.rollout_transport, secret=secret, run=config.run, on_wait=lambda: extend_wait_of_ranks(world), **transfers
    )
    if not config.data.record:
        return receiver
    discard_after(layout.batches, from_step, suffix=BATCH_SUFFIX)  # a run that goes back receives them again
    return RecordingReceiver(receiver, layout=layout)


def set_up_rank(config: TrainingConfig, world: World, *, role: str) -> None:
    """Set up the rank's process: logs without progress bars, status reports, and deterministic algorithms if configured."""
    from transformers.utils.logging import disable_progress_bar

    layout = RunLayout(config.output_dir)
    name = role if world.is_main else f"{role}.{world.rank}"
    setup_logging(name, level=config.log.level, file=layout.rank_log(world.rank), as_json=config.log.json_logging)
    disable_progress_bar()
    process_report.start_reports(layout, role=role, attempt=config.run.attempt, rank=world.rank, num_ranks=world.size)
    process_report.begin("loading the model")
    if config.deterministic:
        # cuBLAS reads this variable when it is first used. Without it, torch refuses deterministic algorithms on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


if __name__ == "__main__":
    sys.exit(main())
