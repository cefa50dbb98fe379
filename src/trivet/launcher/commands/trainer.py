"""Entry of the command `trainer`, which runs the trainer alone: one rank for each visible GPU, or one on the CPU.

The command `sft` starts its ranks through `become_ranks` too.
"""

import os
import sys
from collections.abc import Sequence
from typing import Literal, NoReturn

from trivet.checkpoints.resume import choose_start
from trivet.config.command import run_command
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError
from trivet.launcher.plan import rank_command, rank_environment
from trivet.machine import Machine, compile_cache_directory, inspect_machine

Device = Literal["auto", "cpu", "cuda"]


def main() -> int:
    """Run the command with the arguments of this process and return its exit code."""
    return run_command(TrainerConfig, start, check=check)


def check(config: TrainerConfig) -> None:
    """Check the checkpoint that is resumed, before the ranks start."""
    if config.bench is None:
        choose_start(config)


def start(config: TrainerConfig) -> int:
    """Replace this process by the one that starts the ranks of the trainer."""
    return become_ranks("trivet.trainer.main", sys.argv[1:], device=config.device, num_ranks=None)


def count_ranks(machine: Machine, *, device: Device, num_ranks: int | None) -> int:
    """Return how many ranks to start: `num_ranks`; when it is None, one for each GPU, or one on the CPU.

    Raises:
        ConfigError: there are fewer GPUs than `num_ranks`, or `device` is "cuda" and there is no GPU.
    """
    num_gpus = 0 if device == "cpu" else len(machine.gpus)
    if device == "cuda" and num_gpus == 0:
        raise ConfigError('device is "cuda" but this machine shows no GPU; set it to "auto" or "cpu"')
    if num_gpus and num_ranks is not None and num_ranks > num_gpus:
        raise ConfigError(f"num_ranks ({num_ranks}) must be at most the {num_gpus} GPU(s) of this machine; lower it")
    return num_ranks or num_gpus or 1


def become_ranks(module: str, arguments: Sequence[str], *, device: Device, num_ranks: int | None) -> NoReturn:
    """Replace this process by the one that starts the ranks of `module`, each with the same `arguments`."""
    machine = inspect_machine()
    count = count_ranks(machine, device=device, num_ranks=num_ranks)
    is_on_cpu = device == "cpu" or not machine.gpus
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache_directory()),
        **rank_environment(count, num_cpus=machine.num_cpus, is_on_cpu=is_on_cpu),
    }
    argv = rank_command(sys.executable, module, arguments, num_ranks=count, is_on_cpu=is_on_cpu)
    os.execve(argv[0], argv, {**defaults, **os.environ})


if __name__ == "__main__":
    raise SystemExit(main())
