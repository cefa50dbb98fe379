"""Entry of the command `sft`, supervised fine-tuning.

It starts `num_ranks` ranks, by default one for each visible GPU, or one on the CPU.
"""

import os
import sys
from functools import partial

from trivet.checkpoints.commit import committed_steps
from trivet.checkpoints.resume import adopt, choose_fork, choose_start
from trivet.checkpoints.settings import EVERY_KEY
from trivet.config.command import run_command
from trivet.config.compute_dtype import record_choice
from trivet.config.layout import RunLayout
from trivet.config.schema.sft import FakeDataConfig, SftConfig
from trivet.conversations.mixture import open_data
from trivet.errors import ConfigError
from trivet.launcher.commands.trainer import become_ranks
from trivet.launcher.run_directory import RunDirectory, wait_of_job, write_configs
from trivet.schedulers.submit import submit
from trivet.secret import share_secret


def main() -> int:
    """Run the command with the arguments of this process and return its exit code."""
    return run_command(SftConfig, start, check=check, submit=partial(submit, command="sft"))


def check(config: SftConfig) -> None:
    """Check the checkpoint that is resumed or forked, and the data, before anything is started or written."""
    if config.bench is not None:
        return  # a benchmark reads no data and writes nothing
    layout, ckpt = RunLayout(config.output_dir), config.ckpt
    if ckpt.resume_from is None:
        choose_start(config)
    else:
        choose_fork(layout, source=ckpt.resume_from, resume_step=ckpt.resume_step)
        if committed_steps(layout):
            raise ConfigError(
                f"output_dir {str(layout.root)!r} has checkpoints: to go on with them leave ckpt.resume_from out and set "
                "ckpt.resume_step = -1, for a new run choose another output_dir"
            )
    if not isinstance(config.data, FakeDataConfig):
        open_data(config.data, seed=config.seed, key="data")
    if config.val is not None:
        open_data(config.val.data, seed=config.seed, key="val.data")


def start(config: SftConfig) -> int:
    """Lock the output directory, write the configuration, and replace this process by the one that starts the ranks."""
    if config.bench is not None:
        return become_ranks("trivet.trainer.sft.main", sys.argv[1:], device=config.device, num_ranks=config.num_ranks)
    layout, ckpt = RunLayout(config.output_dir), config.ckpt
    directory = RunDirectory(layout, wait=wait_of_job(os.environ))
    directory.__enter__()
    directory.lock.keep_over_exec()
    write_configs({layout.configs / "sft.toml": config})
    record_choice(layout, config)
    os.environ.update(share_secret(layout, environ=os.environ))
    arguments = [*sys.argv[1:], "--model.compute-dtype", config.model.compute_dtype]
    if ckpt.resume_from is not None:
        step = choose_fork(layout, source=ckpt.resume_from, resume_step=ckpt.resume_step)
        adopt(ckpt.resume_from, step, into=layout)
        # The ranks resume the adopted checkpoint as their own, and may change every setting.
        arguments += ["--ckpt.resume-from", "None", "--ckpt.resume-step", str(step), "--ckpt.allow-changes", f'["{EVERY_KEY}"]']
    return become_ranks("trivet.trainer.sft.main", arguments, device=config.device, num_ranks=config.num_ranks)


if __name__ == "__main__":
    raise SystemExit(main())
