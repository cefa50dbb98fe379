"""Decides what a run starts: which processes, with which arguments, environment, GPUs and role configurations.

Nothing is started, read or written here: the machine, the ports and the run's identity are arguments. `launcher.run` plans a run on
one machine with it, and the supervisor starts the planned processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NewType, TypeVar
from urllib.parse import urlsplit

from trivet.checkpoints.settings import EVERY_KEY
from trivet.config.check_roles import steps_problem, tensor_parallel_problem
from trivet.config.layout import RunLayout
from trivet.config.resolve import LOCAL_HOSTS
from trivet.config.schema.base import Section
from trivet.config.schema.inference import ClientConfig, InferenceConfig, ServerConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import CkptConfig, OriginConfig, RunIdentity, TransportConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError
from trivet.key_names import key_name
from trivet.launcher.gpu_shares import INFERENCE, TEACHER, TRAINER, GpuShares, require_shared_gpu, share_gpus, share_memory
from trivet.machine import Machine
from trivet.process.lifetime import module_command
from trivet.process.openmp import cpu_server_environment

ORCHESTRATOR = "orchestrator"
ORIGIN = "origin"
"""The name of the process that serves policies to servers, and of its unit."""
RecoveryUnit = NewType("RecoveryUnit", str)
"""The name of processes that are restarted together: `training`, or the name of a server."""
ListeningT = TypeVar("ListeningT", TransportConfig, OriginConfig)
TRAINING = RecoveryUnit("training")
"""The unit of orchestrator and trainer, which go back to one checkpoint."""
_SECTIONS = {INFERENCE: "inference", TEACHER: "teacher_inference"}
"""The configuration section of each server, by the name of its process."""
SERVER_KEY, TEACHER_KEY = "INFERENCE_SERVER_KEY", "TEACHER_SERVER_KEY"
"""Environment variables by which the orchestrator gets the `server.api_key` of the servers that the run starts."""

_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "34359738368",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
}
"""Settings with which glibc keeps freed memory, and threads share it. By default glibc returns it to the kernel and pays page
faults to get it again, which halves the speed of torch on a CPU."""
_YIELD_CORES = {"OMP_WAIT_POLICY": "passive"}
"""Roles share the cores: an OpenMP thread that waits must sleep, and not use a core that another role needs."""
_ALLOCATOR_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1"}
"""Otherwise rows of changing lengths fragment the memory of a GPU, and the memory of each pinned tensor is rounded up to a power of
two."""
_GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""GPU ids are those of nvidia-smi. By default CUDA counts the fastest GPU first, so the same id may name another GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports on which the processes of a run listen."""

    inference: int
    transport: int
    teacher: int = 0
    """0 when the run starts no teacher."""
    origin: int = 0
    """0 when the run starts no origin."""
    host: str = ""
    """The address at which other nodes reach transport and origin; empty on one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFile:
    """The file in which one process reports its activity (`telemetry.process_report`)."""

    process: str
    """The name of the process for people: `trainer rank 1 of 4`."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process that the launcher starts: its command, environment and log."""

    name: str
    unit: RecoveryUnit
    """The unit with which it is restarted."""
    argv: tuple[str, ...]
    log: Path
    """File to which stdout and stderr are appended."""
    env: Mapping[str, str]
    """Variables that are set even where the user's environment has another value."""
    env_defaults: Mapping[str, str]
    """Variables that are set unless the user's environment has them."""
    does_finish: bool
    """True for a process that ends by itself after the last step; any other serves until it is stopped."""
    reports: tuple[ReportFile, ...] = ()
    """The report file of the process, or of each trainer rank that it starts."""
    node: int = 0
    """The index of the node on which it runs; 0 is the first node, or the only machine."""
    records_end: bool = True
    """True for a process that records in events.jsonl that it reached the last step, if it finishes at all."""
    starts_after: tuple[str, ...] = ()
    """Servers that must answer before this process starts, because it takes memory of the same GPUs."""
    work: str = ""
    """Kind of work. Units of the same kind can replace each other while a node is lost; empty when no unit can replace it."""
    are_children_watched: bool = False
    """True for a role that needs each of its child processes: the role is stuck when a signal has stopped one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that a run starts, and the configurations that its roles read."""

    processes: tuple[ProcessSpec, ...]
    configs: Mapping[Path, Section]
    """The resolved configuration of each role, by the file that it is written to."""
    notices: tuple[str, ...]
    """Messages for the user, shown once before the start."""
    servers_file: Path | None = None
    """The file with the inference servers' addresses, which the orchestrator reads repeatedly; None: those in `configs` stay."""
    server_urls: Mapping[RecoveryUnit, tuple[str, ...]]
    """The addresses of the servers that this run starts, and of the origin, by their units."""


def plan(
    config: RLConfig, *, machine: Machine, python: str, run: RunIdentity, ports: Ports, resume_step: int | None
) -> RunPlan:
    """Plan the processes of a run and the configuration of each role.

    Args:
        config: the configuration of the run, resolved (`config.resolve`).
        python: the interpreter that runs the roles.
        ports: free ports, which replace the configured ones. A notice names each that differs.
        resume_step: a committed step, or None for a new run.

    Raises:
        ConfigError: a GPU id does not exist, tensor parallelism does not divide the number of GPUs, or no step is left to do.
    """
    if resume_step is not None and (problem := steps_problem(config.max_steps, resume_step=resume_step)):
        raise ConfigError(problem)
    shares = share_gpus(config, machine.gpus)
    require_shared_gpu(config, shares)
    memory = share_memory(config, shares)
    configs = RunLayout(config.output_dir).configs
    orchestrator = orchestrator_config(config, run, ports, resume_step)
    trainer = trainer_config(config, run, ports, resume_step)
    trainer = trainer.model_copy(update={"gpu_memory_utilization": memory.trainer})
    sections: dict[Path, Section] = {configs / "orchestrator.toml": orchestrator, configs / "trainer.toml": trainer}
    processes = [
        trainer_process(config, python, configs / "trainer.toml", shares, machine),
        orchestrator_process(config, python, configs / "orchestrator.toml", is_on_cpu=not shares.trainer),
    ]
    urls: dict[RecoveryUnit, tuple[str, ...]] = {}
    if needs_origin(config):
        processes.insert(0, origin_process(config, python, configs / "trainer.toml"))
        urls[RecoveryUnit(ORIGIN)] = (trainer.weights.origin.local_url,)
    port_choices = [("trainer.rollout_transport.port", config.trainer.rollout_transport.port, ports.transport)]
    if needs_origin(config):
        port_choices.append(("weights.origin.port", config.trainer.weights.origin.port, ports.origin))
    memory_notices: list[str] = []
    teacher_client = orchestrator.teacher_model.client if orchestrator.teacher_model is not None else None
    for name, server, port, gpus, share, client in (
        (INFERENCE, config.inference, ports.inference, shares.inference, memory.inference, orchestrator.client),
        (TEACHER, config.teacher_inference, ports.teacher, shares.teacher, memory.teacher, teacher_client),
    ):
        if server is None or client is None:
            continue
        section, file = _SECTIONS[name], configs / f"{name}.toml"
        planned = server_config(server, run, name=name, port=port, num_gpus=len(gpus), share=share)
        sections[file] = planned
        urls[RecoveryUnit(name)] = tuple(client.base_url)
        process = server_process(name, config, python, file, gpus)
        if not gpus and planned.parallel.tp == planned.parallel.dp == 1:
            process = replace(process, env=cpu_server_environment())
        processes.insert(0, process)
        port_choices.insert(0 if name == INFERENCE else len(port_choices), (f"{section}.server.port", server.server.port, port))
        if (configured := server.gpu_memory_utilization) != (lowered := planned.gpu_memory_utilization):
            memory_notices.append(
                f"another role needs memory on the same GPU: {section}.gpu_memory_utilization {configured} is lowered to {lowered}"
            )
    port_notices = [
        f"{key_name(key)} {configured} is not free; using {chosen}"
        for key, configured, chosen in port_choices
        if configured != chosen
    ]
    return RunPlan(
        processes=tuple(replace(spec, starts_after=shares.servers_before(spec.name)) for spec in processes),
        configs=sections,
        notices=(*shares.notices, *port_notices, *memory_notices),
        server_urls=urls,
    )


def server_config(
    server: InferenceConfig, run: RunIdentity, *, name: str, port: int, num_gpus: int, share: float
) -> InferenceConfig:
    """Return the configuration of a server that the run starts.

    Args:
        name: name of its process, `inference` or `teacher`.
        num_gpus: GPUs that it gets; 0 on the CPU.
        share: largest share of a GPU's memory that it may take, from 0 to 1.

    Raises:
        ConfigError: its parallel layout does not fit the number of GPUs.
    """
    section, tp, dp = _SECTIONS[name], server.parallel.tp, server.parallel.dp
    if num_gpus:
        if problem := tensor_parallel_problem(tp, num_gpus=num_gpus, key=f"{section}.parallel.tp", gpu_ids=f"{name}_gpu_ids"):
            raise ConfigError(problem)
        if dp not in (1, num_gpus // tp):
            raise ConfigError(
                f"{section}.parallel.dp ({dp}) must be GPUs / tp = {num_gpus} / {tp} = {num_gpus // tp}; leave it out"
            )
        dp = num_gpus // tp
    return server.model_copy(
        update={
            "run": run,
            "server": server.server.model_copy(update={"port": port}),
            "parallel": server.parallel.model_copy(update={"dp": dp}),
            "gpu_memory_utilization": min(server.gpu_memory_utilization, share),
        }
    )


def orchestrator_config(config: RLConfig, run: RunIdentity, ports: Ports, resume_step: int | None) -> OrchestratorConfig:
    """Return the orchestrator's configuration, with the run, its ports, and the addresses of the servers that the run starts."""
    orchestrator = config.orchestrator
    client = orchestrator.client
    if config.inference is not None:
        client = _client_of_own_server(client, config.inference.server, port=ports.inference, key_variable=SERVER_KEY)
    teacher = orchestrator.teacher_model
    if config.teacher_inference is not None and teacher is not None:
        teacher_client = _client_of_own_server(
            teacher.client, config.teacher_inference.server, port=ports.teacher, key_variable=TEACHER_KEY
        )
        teacher = teacher.model_copy(update={"client": teacher_client})
    return orchestrator.model_copy(
        update={
            "run": run,
            "teacher_model": teacher,
            "client": client,
            "ckpt": _ckpt_resumed_from(orchestrator.ckpt, resume_step),
            **_addresses(orchestrator, ports),
        }
    )


def trainer_config(config: RLConfig, run: RunIdentity, ports: Ports, resume_step: int | None) -> TrainerConfig:
    """Return the trainer's configuration, with the run, its port, and the step that it resumes from."""
    trainer = config.trainer
    return trainer.model_copy(
        update={"run": run, "ckpt": _ckpt_resumed_from(trainer.ckpt, resume_step), **_addresses(trainer, ports)}
    )


def _addresses(role: TrainerConfig | OrchestratorConfig, ports: Ports) -> dict[str, object]:
    """Return the sections of a role that say where transport and origin listen."""

    def at(section: ListeningT, port: int) -> ListeningT:
        own = {"host": listening_host(section.host, ports.host), "advertise": ports.host} if ports.host else {}
        return section.model_copy(update={"port": port, **own})

    origin = at(role.weights.origin, ports.origin) if ports.origin else role.weights.origin
    return {
        "rollout_transport": at(role.rollout_transport, ports.transport),
        "weights": role.weights.model_copy(update={"origin": origin}),
    }


def listening_host(host: str, own: str) -> str:
    """Return the host on which a process listens: the configured one, else `own`, the address by which other nodes reach it."""
    return own if host in LOCAL_HOSTS and host not in ("0.0.0.0", "::") else host


def needs_origin(config: RLConfig) -> bool:
    """Return whether the run starts an origin: its servers fetch policies, and it has servers."""
    return config.trainer.weights.transport == "http" and config.orchestrator.replay is None


def _ckpt_resumed_from(ckpt: CkptConfig, resume_step: int | None) -> CkptConfig:
    """Return `ckpt` for a role that resumes from `resume_step`, or starts anew when it is None.

    In a fork the launcher has copied the other run's checkpoint already. So the role resumes from it as from its own, and may
    change every setting.
    """
    update: dict[str, object] = {"resume_step": resume_step}
    if ckpt.resume_from is not None:
        update |= {"resume_from": None, "allow_changes": [EVERY_KEY]}
    return ckpt.model_copy(update=update)


def _client_of_own_server(client: ClientConfig, server: ServerConfig, *, port: int, key_variable: str) -> ClientConfig:
    """Return `client` for a server that this run starts on `port`, with the variable that has the server's API key.

    Only addresses on this machine with the server's configured port get the new port.
    """

    def with_port(url: str) -> str:
        parts = urlsplit(url)
        if parts.hostname not in LOCAL_HOSTS or parts.port != server.port:
            return url
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return parts._replace(netloc=f"{host}:{port}").geturl()

    update: dict[str, object] = {"base_url": [with_port(url) for url in client.base_url]}
    if server.api_key is not None:
        update["api_key_var"] = [key_variable]
    return client.model_copy(update=update)


def report_files(layout: RunLayout, role: str, *, num_ranks: int = 1) -> tuple[ReportFile, ...]:
    """Return the report file of each process of a role."""
    names = [role] if num_ranks == 1 else [f"{role} rank {rank} of {num_ranks}" for rank in range(num_ranks)]
    return tuple(ReportFile(process=name, path=layout.report_file(role, rank)) for rank, name in enumerate(names))


def rank_command(python: str, module: str, arguments: Sequence[str], *, num_ranks: int, is_on_cpu: bool) -> tuple[str, ...]:
    """Return the command that runs `module` as `num_ranks` ranks on this machine. Each rank ends with the process that started it.

    Ranks that are given GPUs must not compute on the CPU. That could happen: the launcher finds GPUs through the driver, which may
    be too old for torch.
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


def role_process(
    name: str,
    module: str,
    config: RLConfig,
    python: str,
    file: Path,
    *words: str,
    env: Mapping[str, str] = MappingProxyType({}),
    env_defaults: Mapping[str, str] = MappingProxyType({}),
) -> ProcessSpec:
    """Return the process that runs `module` with the configuration in `file` and with `words`, until it is stopped."""
    layout = RunLayout(config.output_dir)
    return ProcessSpec(
        name=name,
        unit=RecoveryUnit(name),
        argv=tuple(module_command(module, "@", str(file), *words, python=python)),
        log=layout.log_file(f"{name}.stdout"),
        env=dict(env),
        env_defaults={"PYTHONUNBUFFERED": "1", **env_defaults},
        does_finish=False,
        reports=report_files(layout, name),
    )


def server_process(name: str, config: RLConfig, python: str, file: Path, gpus: Sequence[str]) -> ProcessSpec:
    """Return the process of the inference server or teacher `name`, which reads its configuration from `file`."""
    env, defaults = ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)}, _GPU_ORDER) if gpus else ({}, _YIELD_CORES)
    spec = role_process(name, "trivet.inference.main", config, python, file, env=env, env_defaults=defaults)
    return replace(spec, are_children_watched=True)


def origin_process(config: RLConfig, python: str, file: Path) -> ProcessSpec:
    """Return the process of the origin, which reads the trainer's configuration from `file`."""
    return role_process(ORIGIN, "trivet.origin", config, python, file)


def orchestrator_process(config: RLConfig, python: str, file: Path, *, is_on_cpu: bool) -> ProcessSpec:
    """Return the process of the orchestrator, which reads its configuration from `file`."""
    env, defaults = server_keys(config), _KEEP_MEMORY if is_on_cpu else {}
    spec = role_process(ORCHESTRATOR, "trivet.orchestrator.main", config, python, file, env=env, env_defaults=defaults)
    return replace(spec, unit=TRAINING, does_finish=True)


def server_keys(config: RLConfig) -> dict[str, str]:
    """Return the environment variables with the API keys of the servers that the run starts, for the processes that use them."""
    servers = {SERVER_KEY: config.inference, TEACHER_KEY: config.teacher_inference}
    return {name: inference.server.api_key for name, inference in servers.items() if inference and inference.server.api_key}


def trainer_process(config: RLConfig, python: str, file: Path, shares: GpuShares, machine: Machine) -> ProcessSpec:
    """Return the process that starts the trainer's ranks, which read their configuration from `file`."""
    num_ranks = len(shares.trainer) or config.trainer_cpu_ranks
    is_on_cpu = not shares.trainer
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if machine.gpus else {}
    env = hidden if is_on_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(shares.trainer)}
    defaults = rank_environment(num_ranks, num_cpus=machine.num_cpus, is_on_cpu=is_on_cpu)
    module = "trivet.trainer.main"
    return replace(
        role_process(TRAINER, module, config, python, file, env=env, env_defaults=defaults),
        unit=TRAINING,
        argv=rank_command(python, module, ("@", str(file)), num_ranks=num_ranks, is_on_cpu=is_on_cpu),
        does_finish=True,
        reports=report_files(RunLayout(config.output_dir), TRAINER, num_ranks=num_ranks),
        are_children_watched=True,
    )
