"""Entry of one rank of the trainer: `python -m trivet.trainer.main @ trainer.toml`, alone or under torchrun."""

import sys

from trivet.config.command import run_command
from trivet.config.layout import RunLayout
from trivet.config.trainer import TrainerConfig, TrainingConfig
from trivet.lifetime import die_with_parent
from trivet.telemetry.logs import setup_logging
from trivet.trainer.distributed import World, open_world
from trivet.trainer.loop import run
from trivet.transport.zeromq import ZmqReceiver


def main() -> int:
    die_with_parent()
    return run_command(TrainerConfig, start)


def start(config: TrainerConfig) -> int:
    transport = config.rollout_transport
    with open_world(device=config.device, timeout_s=config.dist_timeout_seconds, wait_timeout_s=transport.timeout_s) as world:
        set_up_rank(config, world, role="trainer")
        run(
            config,
            world,
            make_receiver=lambda: ZmqReceiver(transport, run_id=config.run.id, attempt=config.run.attempt),
        )
    return 0


def set_up_rank(config: TrainingConfig, world: World, *, role: str) -> None:
    """Logs to stdout and to the rank's file; no progress bars in them."""
    from transformers.utils.logging import disable_progress_bar

    name = role if world.is_main else f"{role}.{world.rank}"
    setup_logging(name, level=config.log.level, file=RunLayout(config.output_dir).rank_log(world.rank))
    disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
