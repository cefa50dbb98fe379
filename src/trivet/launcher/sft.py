"""The command `sft`: supervised fine-tuning, `num_ranks` ranks, else one for each GPU that is visible, one on the CPU."""

import sys

from trivet.checkpoints.resume import require_resumable
from trivet.config.command import run_command
from trivet.config.layout import RunLayout
from trivet.config.trainer import SftConfig
from trivet.launcher.ranks import become_ranks
from trivet.launcher.run_directory import RunDirectory


def main() -> int:
    return run_command(SftConfig, start, check=require_resumable)


def start(config: SftConfig) -> int:
    directory = RunDirectory(RunLayout(config.output_dir))
    directory.__enter__()
    directory.keep_over_exec()
    return become_ranks("trivet.trainer.sft", sys.argv[1:], device=config.device, num_ranks=config.num_ranks)


if __name__ == "__main__":
    raise SystemExit(main())
