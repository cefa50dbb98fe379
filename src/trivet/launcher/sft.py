"""The command `sft`: supervised fine-tuning, `num_ranks` ranks, else one for each GPU that is visible, one on the CPU."""

import sys

from trivet.config.command import run_command
from trivet.config.trainer import SftConfig
from trivet.launcher.ranks import become_ranks


def main() -> int:
    return run_command(SftConfig, start)


def start(config: SftConfig) -> int:
    return become_ranks("trivet.trainer.sft", sys.argv[1:], device=config.device, num_ranks=config.num_ranks)


if __name__ == "__main__":
    raise SystemExit(main())
