"""What this machine offers a run: the GPUs that are visible and the cores that may be used. Counted without torch."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
_GPU_LINE = re.compile(r"GPU \d+:")
_QUERY_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    gpus: tuple[str, ...]
    """What CUDA_VISIBLE_DEVICES calls each GPU; a GPU id in a configuration is a position in it."""
    num_cpus: int
    """Cores that this process may run on."""


def inspect_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    num_cpus = len(os.sched_getaffinity(0))
    return Machine(gpus=visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), installed=_count_gpus), num_cpus=num_cpus)


def visible_gpus(visible: str | None, *, installed: Callable[[], int]) -> tuple[str, ...]:
    """The GPUs that `visible` (a value of CUDA_VISIBLE_DEVICES, or None) leaves of those that `installed` counts."""
    num_installed = installed()
    if visible is None:
        return tuple(str(index) for index in range(num_installed))
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < num_installed):
            break  # as CUDA does: an invalid entry hides itself and all that follow
        names.append(name)
    return tuple(names) if num_installed else ()


def _count_gpus() -> int:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return len(list(_NVIDIA_PROC.iterdir())) if _NVIDIA_PROC.is_dir() else 0
    return sum(1 for line in listing.stdout.splitlines() if _GPU_LINE.match(line))
