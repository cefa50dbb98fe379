"""Describes the devices that this machine offers a run: visible GPUs, usable cores, and the dtypes that they compute fast.

It also owns the directory for compiled code, and returns unused memory of the heap to the kernel. It does not import torch.
"""

import ctypes
import getpass
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trivet.errors import ConfigError

logger = logging.getLogger(__name__)

_NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
_CPU_INFO = Path("/proc/cpuinfo")
_GPU_LINE = re.compile(r"GPU \d+:")
_CPU_FLAGS_LINE = re.compile(r"^(?:flags|Features)\s*:\s*(.*)$", re.MULTILINE)
"""The line of /proc/cpuinfo with the instruction sets: `flags` on x86, `Features` on arm64."""
_QUERY_TIMEOUT_S = 20.0
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"

_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
"""x86 instructions that multiply bfloat16."""
_ARM_BF16_FLAG = "bf16"
_LIMITS_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA with which oneDNN uses none of the instructions above. Torch multiplies bfloat16 by oneDNN."""

_MAX_HEAP_GROWTH = 1.25
"""The heap is trimmed when the resident memory exceeds the least measured value by this factor."""
_CALLS_PER_MEASUREMENT = 20
"""Calls of `trim_if_grown` for one measurement. If batches really need more memory, a trim happens at most every 20 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices of this machine that a run may use."""

    gpus: tuple[str, ...]
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES has them. A GPU id in a configuration is an index into this tuple."""
    num_cpus: int
    """Cores that this process may run on."""
    architecture: str = "x86_64"
    """The kernel's name of the processor architecture."""
    cpu_flags: frozenset[str] = frozenset()
    """Instruction sets of the processor, as /proc/cpuinfo spells them."""
    max_cpu_isa: str = ""
    """The value of ONEDNN_MAX_CPU_ISA, which limits the instruction sets that oneDNN uses, in capitals; empty: no limit."""
    compute_capabilities: tuple[tuple[int, int], ...] = ()
    """Major and minor number of each visible GPU; empty if the driver does not report them."""

    @property
    def bf16_instructions(self) -> tuple[str, ...]:
        """The processor's instructions that torch uses for bfloat16 products; empty if torch emulates these products.

        Measured with 1024 x 1024 products on two cores, in GFLOP/s. AMX: 1,240 in bfloat16, 120 in float32. AVX512-BF16 without
        AMX (Zen 5): 895 and 200. AVX-512 with neither: 30 in bfloat16. AVX2 alone: 0.4.
        """
        if self.architecture in ("aarch64", "arm64"):
            return (_ARM_BF16_FLAG,) if _ARM_BF16_FLAG in self.cpu_flags else ()
        if self.max_cpu_isa in _LIMITS_WITHOUT_BF16:
            return ()
        return tuple(flag for flag in _BF16_FLAGS if flag in self.cpu_flags)


def inspect_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Return the devices of this machine, as CUDA_VISIBLE_DEVICES and oneDNN's limit in `environ` restrict them."""
    gpus = select_visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), num_installed=_count_gpus()) if _has_cuda_torch() else ()
    return Machine(
        gpus=gpus,
        num_cpus=len(os.sched_getaffinity(0)),
        architecture=platform.machine(),
        cpu_flags=_read_cpu_flags(),
        max_cpu_isa=(environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "").upper(),
        compute_capabilities=select_capabilities(gpus, installed=_query_capabilities()) if gpus else (),
    )


def compile_cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Make and return the directory for code that torch.compile generates for this processor, the value of TORCHINDUCTOR_CACHE_DIR.

    The directory belongs to this user alone: code is loaded from it, and every user may create directories beside temporary files.

    Torch's own default is one directory for every processor, and its cache keys do not contain the instruction set. Code that was
    generated for AVX-512 is then compiled again for AVX2 and computes different values without an error: vLLM's sampler drew other
    tokens (torch 2.13; seen when a run with ATEN_CPU_CAPABILITY=avx2 followed a run without it).
    """
    if chosen := environ.get(_COMPILE_CACHE):
        return Path(chosen)
    processor = " ".join([platform.machine(), *sorted(_read_cpu_flags()), environ.get("ATEN_CPU_CAPABILITY", "")])
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a container's user need not have a name
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)  # the other characters may be in a path
    name = f"torchinductor_{user}_{hashlib.sha256(processor.encode()).hexdigest()[:12]}"
    return make_private_directory(Path(tempfile.gettempdir()) / name)


def make_private_directory(path: Path, *, setting: str = f"TMPDIR or {_COMPILE_CACHE}") -> Path:
    """Make the directory `path` for this user alone, or use the existing one. Raises a ConfigError if it is another user's.

    Args:
        setting: what to set for another directory, in the error's words.
    """
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{path} belongs to another user, who could change what is in it: remove it, or set {setting}")
        if found.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be made: {exc.strerror}; free disk space there, or set {setting}") from exc
    return path


def select_visible_gpus(visible: str | None, *, num_installed: int) -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES; None if it is not set, and all GPUs are visible.
        num_installed: the number of installed GPUs.
    """
    if visible is None:
        return tuple(str(index) for index in range(num_installed))
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < num_installed):
            break  # as CUDA does: an invalid entry hides itself and all that follow
        names.append(name)
    return tuple(names) if num_installed else ()


def select_capabilities(gpus: Sequence[str], *, installed: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the compute capability of each of `gpus`.

    A GPU may be named by a UUID. Its position is then unknown, and all of `installed`, the capabilities in the driver's order, are
    returned.
    """
    if all(name.isdigit() and int(name) < len(installed) for name in gpus):
        return tuple(installed[int(name)] for name in gpus)
    return tuple(installed)


def _has_cuda_torch() -> bool:
    """Return whether torch may use a GPU: its CPU build computes on the CPU even if the driver shows GPUs."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True  # the roles may run with another interpreter


def _count_gpus() -> int:
    listing = ask_nvidia_smi("-L")
    if listing is None:
        return len(list(_NVIDIA_PROC.iterdir())) if _NVIDIA_PROC.is_dir() else 0
    return sum(1 for line in listing.splitlines() if _GPU_LINE.match(line))


def _query_capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each installed GPU; an empty list if the driver is too old to report it."""
    answer = ask_nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader") or ""
    found = re.findall(r"^(\d+)\.(\d+)\s*$", answer, re.MULTILINE)
    return [(int(major), int(minor)) for major, minor in found]


def ask_nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi, or None if it is not installed or fails."""
    command = ["nvidia-smi", *arguments]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout


def _read_cpu_flags() -> frozenset[str]:
    try:
        match = _CPU_FLAGS_LINE.search(_CPU_INFO.read_text(errors="replace"))
    except OSError:
        return frozenset()
    return frozenset(match.group(1).split()) if match else frozenset()


class Heap:
    """The heap of this process. The trainer trims it after steps, a server after it has loaded a policy.

    On a CPU the launcher makes glibc keep freed memory (`launcher.plan`), because a tensor in new memory costs a page fault for
    every 4 KiB. Tensors differ in size from step to step, so the kept memory fragments: SmolLM2's trainer grew by 30 MB a step,
    from 3 to 8 GiB within a hundred steps, of which 3 GiB were in use. To return 2 GiB to the kernel and to get them again takes
    about two seconds, so the heap is trimmed only if it has grown.
    """

    def __init__(self) -> None:
        """Start to count calls."""
        self._num_calls = 0
        self._least_bytes: int | None = None

    def trim_if_grown(self) -> None:
        """Return free memory to the kernel if the process is a quarter larger than at its smallest. Every 20th call measures."""
        self._num_calls += 1
        if self._num_calls % _CALLS_PER_MEASUREMENT:
            return
        num_bytes = resident_bytes()
        if self._least_bytes and num_bytes > _MAX_HEAP_GROWTH * self._least_bytes:
            before = num_bytes
            trim_heap()
            num_bytes = resident_bytes()
            logger.info("heap trimmed from_gib=%.2f to_gib=%.2f", before / 2**30, num_bytes / 2**30)
        self._least_bytes = min(num_bytes, self._least_bytes or num_bytes)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on a system that does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def total_memory_gib() -> float:
    """Return the main memory of this machine in GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def trim_heap() -> None:
    """Return every free page of the heap to the kernel. With a C library without `malloc_trim` this does nothing."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
