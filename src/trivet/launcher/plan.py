"""Decides what a run starts: which processes, with which arguments, environment, GPUs and role configurations.

Pure: the machine, the ports and the run's identity are given. `launcher.run` carries the plan out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NewType

from trivet.config.checks.numbers import steps_problem
from trivet.config.layout import RunLayout
from trivet.config.sections.base import Section
from trivet.config.sections.inference import InferenceConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.shared import RunIdentity
from trivet.errors import ConfigError
from trivet.key_names import key_name
from trivet.launcher.role_configs import SERVER_KEY, TEACHER_KEY, Ports, orchestrator_config, server_config, trainer_config
from trivet.machine import Machine
from trivet.process.lifetime import module_command

INFERENCE, TEACHER, ORCHESTRATOR, TRAINER = "inference", "teacher", "orchestrator", "trainer"
RecoveryUnit = NewType("RecoveryUnit", str)
"""The name of processes that are restarted together: `training`, or the name of a server."""
TRAINING = RecoveryUnit("training")
"""The unit of orchestrator and trainer, which go back to one checkpoint."""
SHARED_GPU_MEMORY = 0.5
"""Share of a GPU that the inference server takes when the trainer or a teacher needs the same one."""
SHARED_TEACHER_MEMORY = 0.25
"""Share of a GPU that a teacher's server takes when another role needs the same one."""
_CONTEXT_MEMORY = 0.08
"""Share of a GPU that is left for what no allocator counts: the CUDA contexts of a rank and of a server, and buffers of NCCL. vLLM
refuses to start where its share is not free besides its own context."""

_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "34359738368",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
}
"""Otherwise glibc gives freed memory back to the kernel and pays page faults to get it again: torch on a CPU at half speed. Threads
share what is kept."""


_YIELD_CORES = {"OMP_WAIT_POLICY": "passive"}
"""Roles share the cores: an OpenMP thread that waits must sleep, not spin in the way of the other role's threads."""


_ALLOCATOR_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1"}
"""Rows of changing lengths fragment the memory of a GPU otherwise, and each pinned tensor takes memory up to a power of two."""
_GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""GPUs are counted by nvidia-smi. CUDA's own order, the fastest first, would give their numbers to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFile:
    """The place where one process reports what it does."""

    process: str
    """The name of the process for people: `trainer rank 1 of 4`."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process that the launcher starts: its command, environment and log."""

    name: str
    unit: RecoveryUnit
    argv: tuple[str, ...]
    log: Path
    """File to which stdout and stderr are appended."""
    env: Mapping[str, str]
    """Variables that are set whatever the user's environment says."""
    env_defaults: Mapping[str, str]
    """Variables that are set unless the user's environment has them."""
    does_finish: bool
    """True for a process that ends by itself after the last step; any other serves until it is stopped."""
    reports: tuple[ReportFile, ...] = ()
    """Where its processes report what they do."""
    node: int = 0
    """The index of the node on which it runs."""
    records_end: bool = True
    """True for a process that records in events.jsonl that it reached the last step, if it finishes at all."""
    starts_after: tuple[str, ...] = ()
    """Servers that must answer before this process starts, because it takes memory of the same GPUs."""
    work: str = ""
    """Kind of work. Units of the same kind replace each other while a node is lost; empty: nobody replaces it."""
    are_children_watched: bool = False
    """True for a role that cannot do without any of its processes: one that is stopped makes the role stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShares:
    """The GPUs of each role, by their names in CUDA_VISIBLE_DEVICES; none means the CPU."""

    inference: tuple[str, ...]
    trainer: tuple[str, ...]
    teacher: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def servers_before(self, name: str) -> tuple[str, ...]:
        """Return the servers on a GPU of the role `name` that start before it.

        vLLM measures what it takes by what is free while it starts: memory that another process takes then counts as vLLM's, and
        memory that one frees ends it.
        """
        gpus = {TEACHER: self.teacher, INFERENCE: self.inference, TRAINER: self.trainer}
        earlier = list(gpus)[: list(gpus).index(name)] if name in gpus else []
        return tuple(server for server in earlier if not set(gpus[server]).isdisjoint(gpus[name]))

    @property
    def is_shared(self) -> bool:
        """True when the inference server is not alone on its GPUs."""
        return not set(self.inference).isdisjoint((*self.trainer, *self.teacher))

    @property
    def is_teacher_shared(self) -> bool:
        """True when the teacher's server is not alone on its GPUs."""
        return not set(self.teacher).isdisjoint((*self.trainer, *self.inference))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that a run starts, and the configurations that its roles read."""

    processes: tuple[ProcessSpec, ...]
    configs: Mapping[Path, Section]
    """The resolved configuration of each role, by the file that it is written to."""
    notices: tuple[str, ...]
    """Messages for the user, shown once before the start."""
    servers_file: Path | None = None
    """The file in which the orchestrator looks for the inference servers; None: they stay where `configs` says."""
    server_urls: Mapping[RecoveryUnit, tuple[str, ...]]
    """The addresses at which the servers answer that this run starts, by their units."""


def plan(
    config: RLConfig,
    *,
    machine: Machine,
    python: str,
    run: RunIdentity,
    ports: Ports,
    resume_step: int | None,
) -> RunPlan:
    """Plan the processes of a run and the configuration of each role.

    Args:
        config: resolved (config.loading.resolve).
        python: the interpreter that runs the roles.
        ports: free ports; one that differs from the configured port replaces it.
        resume_step: a committed step, or None for a fresh run.

    Raises:
        ConfigError: GPU ids that do not exist, or that tensor parallelism does not divide; no step is left to do.
    """
    if resume_step is not None and (problem := steps_problem(config.max_steps, resume_step=resume_step)):
        raise ConfigError(problem)
    shares = share_gpus(config, machine.gpus)
    if config.inference is not None and config.inference.sleep_while_training and not shares.is_shared:
        raise ConfigError(
            f"{key_name('inference.sleep_while_training')} is for a server on the trainer's GPUs; "
            + ("here each has its own" if machine.gpus else "this machine shows no GPU")
            + f": remove it, or give {key_name('inference_gpu_ids')} and {key_name('trainer_gpu_ids')} the same ids"
        )
    configs = RunLayout(config.output_dir).configs
    inference = server_config(
        config.inference,
        run,
        name="inference",
        port=ports.inference,
        num_gpus=len(shares.inference),
        share=_server_share(config, shares),
    )
    teacher = server_config(
        config.teacher_inference,
        run,
        name="teacher",
        port=ports.teacher,
        num_gpus=len(shares.teacher),
        share=SHARED_TEACHER_MEMORY if shares.is_teacher_shared else 1.0,
    )
    orchestrator = orchestrator_config(config, run, ports, resume_step)
    trainer = trainer_config(config, run, ports, resume_step)
    share = _trainer_share(shares, inference, teacher)
    trainer = trainer.model_copy(update={"gpu_memory_utilization": min(trainer.gpu_memory_utilization, share)})
    sections: dict[Path, Section] = {configs / "orchestrator.toml": orchestrator, configs / "trainer.toml": trainer}
    processes = [
        trainer_process(config, python, configs / "trainer.toml", shares, machine),
        orchestrator_process(config, python, configs / "orchestrator.toml", is_on_cpu=not shares.trainer),
    ]
    urls: dict[RecoveryUnit, tuple[str, ...]] = {}
    if inference is not None:
        sections[configs / "inference.toml"] = inference
        urls[RecoveryUnit(INFERENCE)] = tuple(orchestrator.client.base_url)
        processes.insert(0, server_process(INFERENCE, config, python, configs / "inference.toml", shares.inference))
    if teacher is not None and orchestrator.teacher_model is not None:
        sections[configs / "teacher.toml"] = teacher
        urls[RecoveryUnit(TEACHER)] = tuple(orchestrator.teacher_model.client.base_url)
        processes.insert(0, server_process(TEACHER, config, python, configs / "teacher.toml", shares.teacher))
    return RunPlan(
        processes=tuple(replace(spec, starts_after=shares.servers_before(spec.name)) for spec in processes),
        configs=sections,
        notices=(
            *shares.notices,
            *_port_notices(config, ports),
            *_memory_notices("inference", config.inference, inference),
            *_memory_notices("teacher_inference", config.teacher_inference, teacher),
        ),
        server_urls=urls,
    )


def _server_share(config: RLConfig, shares: GpuShares) -> float:
    """Return the largest share of a GPU's memory that the inference server may take.

    A server that sleeps while the trainer learns shares with what the trainer keeps on the GPU between two steps.
    """
    sleeps = config.inference is not None and config.inference.sleep_while_training
    is_with_teacher = not set(shares.teacher).isdisjoint(shares.inference)
    if sleeps and config.trainer.model.fsdp_cpu_offload and not is_with_teacher:
        return round(1 - _CONTEXT_MEMORY, 3)  # the trainer keeps nothing there
    return SHARED_GPU_MEMORY if shares.is_shared else 1.0


def _trainer_share(shares: GpuShares, *servers: InferenceConfig | None) -> float:
    """Return the share of a GPU's memory that the servers on the trainer's GPUs leave to a rank while it learns."""
    taken = [
        0.0 if server.sleep_while_training else server.gpu_memory_utilization
        for server, gpus in zip(servers, (shares.inference, shares.teacher), strict=True)
        if server is not None and not set(gpus).isdisjoint(shares.trainer)
    ]
    return round(1 - sum(taken) - _CONTEXT_MEMORY, 3) if taken else 1.0


def share_gpus(config: RLConfig, gpus: Sequence[str]) -> GpuShares:
    """Choose which of the machine's GPUs each role gets.

    Raises:
        ConfigError: an id without a GPU, an id twice, or a role without any.
    """
    if not gpus:
        if config.trainer.device == "cuda":
            raise ConfigError('trainer.device is "cuda" but this machine shows no GPU; set it to "auto" or "cpu"')
        return GpuShares(inference=(), trainer=())
    serves, trains = config.inference is not None, config.trainer.device != "cpu"
    inference_ids = config.inference_gpu_ids if serves else []
    trainer_ids = config.trainer_gpu_ids if trains else []
    teaches = config.teacher_inference is not None
    teacher_ids = _teacher_ids(config, len(gpus)) if teaches else []
    notices: list[str] = []
    if len(gpus) == 1 and trainer_ids == [1]:
        trainer_ids = [0]
        if serves:
            notices.append(
                f"one GPU: inference and trainer share it (set {key_name('trainer_gpu_ids')} = [0] to say so yourself)"
            )
    for key, ids, is_used in (
        ("inference_gpu_ids", inference_ids, serves),
        ("trainer_gpu_ids", trainer_ids, trains),
        ("teacher_gpu_ids", teacher_ids, teaches),
    ):
        if is_used:
            _check_ids(key_name(key), ids, len(gpus))
    return GpuShares(
        inference=tuple(gpus[index] for index in inference_ids),
        trainer=tuple(gpus[index] for index in trainer_ids),
        teacher=tuple(gpus[index] for index in teacher_ids),
        notices=tuple(notices),
    )


def report_files(layout: RunLayout, role: str, *, num_ranks: int = 1) -> tuple[ReportFile, ...]:
    """Return where each process of a role reports."""
    names = [role] if num_ranks == 1 else [f"{role} rank {rank} of {num_ranks}" for rank in range(num_ranks)]
    return tuple(ReportFile(process=name, path=layout.report_file(role, rank)) for rank, name in enumerate(names))


def rank_command(python: str, module: str, arguments: Sequence[str], *, num_ranks: int, is_on_cpu: bool) -> tuple[str, ...]:
    """Return the command that runs `module` as `num_ranks` ranks on this machine; each rank ends with the one that started it.

    Ranks that were given GPUs refuse to compute on the CPU: the launcher asks the driver what is there, torch may find it too old.
    """
    device = () if is_on_cpu else ("--device", "cuda")
    return tuple(module_command("trivet.trainer.ranks.starter", str(num_ranks), module, *arguments, *device, python=python))


def rank_environment(num_ranks: int, *, num_cpus: int, is_on_cpu: bool) -> dict[str, str]:
    """Return environment defaults of trainer ranks on one machine: they share its cores, and connect over loopback."""
    common = {
        "OMP_NUM_THREADS": str(max(1, num_cpus // num_ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return common | (_KEEP_MEMORY | _YIELD_CORES if is_on_cpu else _GPU_ORDER | _ALLOCATOR_SETTINGS)


def _teacher_ids(config: RLConfig, num_gpus: int) -> list[int]:
    if config.teacher_gpu_ids is not None:
        return config.teacher_gpu_ids
    if num_gpus > 1:
        raise ConfigError("teacher_gpu_ids is not set: name the GPUs of [teacher_inference]; they may be those of another role")
    return [0]


def _check_ids(key: str, ids: Sequence[int], num_gpus: int) -> None:
    missing = [index for index in ids if not 0 <= index < num_gpus]
    if missing or not ids or len(set(ids)) != len(ids):
        problem = f"GPU {', '.join(map(str, missing))} does not exist" if missing else "each GPU once, and at least one"
        raise ConfigError(
            f"{key} = {list(ids)}: {problem}; this machine shows {num_gpus} GPU(s), ids 0 to {num_gpus - 1} "
            "(CUDA_VISIBLE_DEVICES counts); change the ids"
        )


def server_process(name: str, config: RLConfig, python: str, file: Path, gpus: Sequence[str]) -> ProcessSpec:
    """Return the process of the inference server or teacher `name`, which reads `file`."""
    return ProcessSpec(
        name=name,
        unit=RecoveryUnit(name),
        argv=tuple(module_command("trivet.inference.main", "@", str(file), python=python)),
        log=RunLayout(config.output_dir).log_file(f"{name}.stdout"),
        env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {},
        env_defaults={"PYTHONUNBUFFERED": "1"} | (_GPU_ORDER if gpus else _YIELD_CORES),
        does_finish=False,
        reports=report_files(RunLayout(config.output_dir), name),
        are_children_watched=True,
    )


def orchestrator_process(config: RLConfig, python: str, file: Path, *, is_on_cpu: bool) -> ProcessSpec:
    """Return the process of the orchestrator, which reads `file`."""
    return ProcessSpec(
        name=ORCHESTRATOR,
        unit=TRAINING,
        argv=tuple(module_command("trivet.orchestrator.main", "@", str(file), python=python)),
        log=RunLayout(config.output_dir).log_file("orchestrator.stdout"),
        env=server_keys(config),
        env_defaults={"PYTHONUNBUFFERED": "1"} | (_KEEP_MEMORY if is_on_cpu else {}),
        does_finish=True,
        reports=report_files(RunLayout(config.output_dir), ORCHESTRATOR),
    )


def server_keys(config: RLConfig) -> dict[str, str]:
    """Return the variables with the keys of the servers that the run starts, for those who ask them."""
    servers = {SERVER_KEY: config.inference, TEACHER_KEY: config.teacher_inference}
    return {name: inference.server.api_key for name, inference in servers.items() if inference and inference.server.api_key}


def trainer_process(config: RLConfig, python: str, file: Path, shares: GpuShares, machine: Machine) -> ProcessSpec:
    """Return the process that starts the trainer's ranks, which read `file`."""
    num_ranks = len(shares.trainer) or config.trainer_cpu_ranks
    is_on_cpu = not shares.trainer
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if machine.gpus else {}
    return ProcessSpec(
        name=TRAINER,
        unit=TRAINING,
        argv=rank_command(python, "trivet.trainer.main", ("@", str(file)), num_ranks=num_ranks, is_on_cpu=is_on_cpu),
        log=RunLayout(config.output_dir).log_file("trainer.stdout"),
        env=hidden if is_on_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(shares.trainer)},
        env_defaults={
            "PYTHONUNBUFFERED": "1",
            **rank_environment(num_ranks, num_cpus=machine.num_cpus, is_on_cpu=is_on_cpu),
        },
        does_finish=True,
        reports=report_files(RunLayout(config.output_dir), TRAINER, num_ranks=num_ranks),
        are_children_watched=True,
    )


def _port_notices(config: RLConfig, ports: Ports) -> list[str]:
    wanted = [("trainer.rollout_transport.port", config.trainer.rollout_transport.port, ports.transport)]
    if config.inference is not None:
        wanted.insert(0, ("inference.server.port", config.inference.server.port, ports.inference))
    if config.teacher_inference is not None:
        wanted.append(("teacher_inference.server.port", config.teacher_inference.server.port, ports.teacher))
    return [f"{key_name(key)} {port} is not free; using {found}" for key, port, found in wanted if port != found]


def _memory_notices(section: str, configured: InferenceConfig | None, planned: InferenceConfig | None) -> list[str]:
    if planned is None or configured is None:
        return []
    wanted, given = configured.gpu_memory_utilization, planned.gpu_memory_utilization
    if wanted == given:
        return []
    return [f"another role needs memory on the same GPU: {section}.gpu_memory_utilization {wanted} is lowered to {given}"]
