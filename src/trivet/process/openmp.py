"""Chooses the environment of a server that computes on the CPU: OpenMP's variables and the libraries to load first.

Both must be set before Python starts. The launcher sets them for the servers that it starts. A server that was started without
them restarts itself (`inference.engine_process`), which imports trivet a second time.
"""

import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def cpu_server_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment, besides `environ`, of a server whose engine and worker compute in one process on the CPU."""
    return {
        "OMP_NUM_THREADS": str(count_physical_cores()),
        "LD_PRELOAD": prepend_to_preload(find_openmp(), ld_preload=environ.get("LD_PRELOAD", "")),
        # Threads that wait by spinning take the cores from the trainer, and from the one they wait for: with two cores in use
        # by others, 64 requests at a time got 420-950 tokens/s by spinning and 2,600-5,700 by sleeping (tiny model).
        "OMP_WAIT_POLICY": "PASSIVE",
        # Worker processes for compilation cannot be started by a daemonic process.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Compiled kernels ask for the number of threads instead of fixing it.
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
    }


def count_physical_cores(*, cpus: Iterable[int] | None = None, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Count the physical cores of `cpus`. Two CPUs may be threads of one core, which share its arithmetic units.

    Args:
        cpus: numbers of logical CPUs; None: the CPUs that this process may use.
        root: the directory with a directory `cpuN` for each.
    """
    cores = set()
    for cpu in os.sched_getaffinity(0) if cpus is None else cpus:
        try:
            cores.add((root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def prepend_to_preload(libraries: Iterable[str], *, ld_preload: str) -> str:
    """Return the value of LD_PRELOAD in which `libraries` come before the libraries of its present value, `ld_preload`."""
    present = ld_preload.split(":") if ld_preload else []
    return ":".join([*(library for library in libraries if library not in present), *present])


def find_openmp() -> list[str]:
    """Return the path of the OpenMP runtime that torch ships, or nothing. If it is not loaded first, vLLM's kernels load another.

    Source: vllm-project/vllm#27369.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    package = Path(spec.origin).parent
    found = [*package.parent.glob("torch.libs/libgomp*.so*"), *package.glob("lib/libgomp*.so*")]
    return [str(found[0])] if found else []
