"""The command `trainer`: the trainer alone, one rank for each GPU that is visible, one on the CPU."""

import sys

from trivet.checkpoints.resume import require_resumable
from trivet.config.command import run_command
from trivet.config.schema.trainer import TrainerConfig
from trivet.launcher.commands.ranks import become_ranks


def main() -> int:
    """Run the command with the arguments of this process; returns its exit code."""
    return run_command(TrainerConfig, start, check=check)


def check(config: TrainerConfig) -> None:
    """Refuse what cannot start, before the ranks do."""
    if config.bench is None:
        require_resumable(config)


def start(config: TrainerConfig) -> int:
    """Become the ranks of the trainer."""
    return become_ranks("trivet.trainer.main", sys.argv[1:], device=config.device, num_ranks=None)


if __name__ == "__main__":
    raise SystemExit(main())
