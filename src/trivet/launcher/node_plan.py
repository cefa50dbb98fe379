"""Decides what a run of several nodes starts, on which node, and at which addresses its processes find each other.

Pure, like `launcher.plan` for one machine: the nodes that came, their ports and the run's identity are given.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trivet.config.check_roles import steps_problem
from trivet.config.layout import RunLayout
from trivet.config.schema.base import Section
from trivet.config.schema.environment import EnvNodesConfig
from trivet.config.schema.inference import ElasticConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.errors import ConfigError
from trivet.launcher.gpu_shares import TRAINER, GpuShares
from trivet.launcher.placement import ENVIRONMENTS, RENDEZVOUS, TRANSPORT, Placement, ServerPlacement
from trivet.launcher.plan import (
    ORIGIN,
    TRAINING,
    Ports,
    ProcessSpec,
    RecoveryUnit,
    RunPlan,
    listening_host,
    orchestrator_config,
    orchestrator_process,
    origin_process,
    report_files,
    role_process,
    server_config,
    server_keys,
    server_process,
    trainer_config,
    trainer_process,
)
from trivet.machine import Machine
from trivet.process.sockets import RankPlace, ServerShard, shard_name

_LOOPBACK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that have the ranks of one machine connect over loopback."""
_SERVING, _ENVIRONMENTS = "serving", "environments"
"""Kinds of work in which one role replaces another whose node is lost."""
_DRAIN_SHARE = 0.8
"""Share of the grace period in which a node finishes the groups that it runs. In the rest its workers end."""
_SYNC_INTERVAL_S = 1.0
"""Seconds between the orchestrator's checks whether a server came back at another address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A part of a machine on which processes of a run start, as its actor has described it."""

    index: int
    name: str
    """The node's host name, for messages."""
    host: str
    """The address at which other nodes reach it."""
    interface: str
    """The network interface that has this address; empty when unknown."""
    machine: Machine
    ports: Mapping[str, int]
    """Ports that it holds, by the names of what will listen on them."""


def plan_over_nodes(
    config: RLConfig,
    *,
    placement: Placement,
    nodes: Mapping[int, Node],
    python: str,
    run: RunIdentity,
    resume_step: int | None,
) -> RunPlan:
    """Plan the processes of a run of several nodes and the configuration of each role.

    Args:
        config: resolved (config.resolve).
        nodes: those that are there, by their indices; a server whose node is lost keeps the address that it had.
        python: the interpreter that runs the roles, at one path on all nodes.
        resume_step: a committed step, or None for a fresh run.

    Raises:
        ConfigError: no step is left to do.
    """
    if resume_step is not None and (problem := steps_problem(config.max_steps, resume_step=resume_step)):
        raise ConfigError(problem)
    configs = RunLayout(config.output_dir).configs
    leader = nodes[placement.trainer_nodes[0]]
    ports = Ports(inference=0, transport=leader.ports[TRANSPORT], origin=leader.ports.get(ORIGIN, 0), host=leader.host)
    trainer = trainer_config(config, run, ports, resume_step)
    model = trainer.model.model_copy(update={"dp_replicate": _count_copies(config, placement)})
    trainer = trainer.model_copy(update={"model": model})
    urls = {server.name: _url(nodes[server.node], server.name) for server in placement.servers}
    orchestrator = orchestrator_config(config, run, ports, resume_step)
    orchestrator = orchestrator.model_copy(
        update={"env_nodes": _env_nodes(config, placement, nodes[placement.orchestrator_node])}
        | ({"client": orchestrator.client.model_copy(update=_servers(config, urls))} if urls else {})
    )
    sections: dict[Path, Section] = {configs / "orchestrator.toml": orchestrator, configs / "trainer.toml": trainer}
    processes: list[ProcessSpec] = []
    if placement.has_origin:  # it moves with the trainer, so both restart together
        processes.append(replace(origin_process(config, python, configs / "trainer.toml"), node=leader.index, unit=TRAINING))
    for server in placement.servers:
        node, file = nodes[server.node], configs / f"{server.name}.toml"
        num_gpus = 0 if len(server.nodes) > 1 else len(server.gpu_ids)  # 0: over several nodes it is one replica
        assert config.inference is not None
        section = server_config(
            config.inference, run, name="inference", port=node.ports[server.name], num_gpus=num_gpus, share=1.0
        )
        bound = section.server.model_copy(update={"host": listening_host(section.server.host, node.host)})
        sections[file] = section.model_copy(update={"server": bound, "name": server.name})
        processes += _server_processes(config, python, file, server=server, nodes=nodes)
    processes += _trainer_processes(config, python, configs / "trainer.toml", placement=placement, nodes=nodes, run=run)
    processes.append(
        replace(
            orchestrator_process(config, python, configs / "orchestrator.toml", is_on_cpu=config.deployment.gpus_per_node == 0),
            node=placement.orchestrator_node,
        )
    )
    processes += _worker_processes(config, python, configs / "orchestrator.toml", placement=placement, known=nodes)
    return RunPlan(
        processes=tuple(processes),
        configs=sections,
        notices=(),
        servers_file=RunLayout(config.output_dir).servers if urls else None,
        server_urls={RecoveryUnit(name): (url,) for name, url in urls.items()},
    )


def _count_copies(config: RLConfig, placement: Placement) -> int:
    """Return the copies of the trainer's model: as configured, or one when nodes were lost and the rest does not divide."""
    group = config.deployment.nodes_per_fsdp_group
    if group is None:
        model = config.trainer.model
        return model.dp_replicate if placement.num_ranks % (model.dp_replicate * model.cp) == 0 else 1
    num_nodes = len(placement.trainer_nodes)
    return num_nodes // group if num_nodes % group == 0 else 1


def _url(node: Node, name: str) -> str:
    host = f"[{node.host}]" if ":" in node.host else node.host
    return f"http://{host}:{node.ports[name]}/v1"


def _servers(config: RLConfig, urls: Mapping[str, str]) -> dict[str, object]:
    servers = ElasticConfig(servers_file=RunLayout(config.output_dir).servers, sync_interval=_SYNC_INTERVAL_S)
    return {"base_url": list(urls.values()), "elastic": servers}


def _server_processes(
    config: RLConfig, python: str, file: Path, *, server: ServerPlacement, nodes: Mapping[int, Node]
) -> Iterator[ProcessSpec]:
    """Yield the process of each node of a server. They are one unit: when one fails, all are started again."""
    layout, first = RunLayout(config.output_dir), nodes[server.node]
    for index, number in enumerate(server.nodes):
        node, name = nodes[number], shard_name(server.name, index)
        gpus = [node.machine.gpus[position] for position in server.gpu_ids]
        spec = server_process(server.name, config, python, file, gpus)
        env = {**spec.env, **({"CUDA_VISIBLE_DEVICES": ""} if node.machine.gpus and not gpus else {})}
        defaults = spec.env_defaults
        if len(server.nodes) > 1:
            shard = ServerShard(index=index, num_shards=len(server.nodes), host=first.host, port=first.ports[server.rendezvous])
            env |= shard.environment() | {"VLLM_HOST_IP": node.host}
            defaults = {**defaults, **_interfaces(node)}
        yield replace(
            spec,
            name=name,
            node=number,
            work=_SERVING,
            log=layout.log_file(f"{name}.stdout"),
            env=env,
            env_defaults=defaults,
            reports=report_files(layout, name),
        )


def _trainer_processes(
    config: RLConfig, python: str, file: Path, *, placement: Placement, nodes: Mapping[int, Node], run: RunIdentity
) -> Iterator[ProcessSpec]:
    """Yield the process that starts the ranks of each node that trains. The first one's name is `trainer`."""
    layout = RunLayout(config.output_dir)
    reports = report_files(layout, TRAINER, num_ranks=placement.num_ranks)
    leader, per_node = nodes[placement.trainer_nodes[0]], placement.ranks_per_node
    for position, index in enumerate(placement.trainer_nodes):
        node, first = nodes[index], position * per_node
        shares = GpuShares(inference=(), trainer=node.machine.gpus[: config.deployment.gpus_per_node])
        spec = trainer_process(config, python, file, shares, node.machine)
        place = RankPlace(
            first_rank=first,
            num_ranks=placement.num_ranks,
            host=leader.host,
            port=leader.ports[RENDEZVOUS],
            attempt=run.attempt,
        )
        several = len(placement.trainer_nodes) > 1
        defaults = {name: value for name, value in spec.env_defaults.items() if not several or name not in _LOOPBACK}
        yield replace(
            spec,
            name=f"{TRAINER}-{position}" if position else TRAINER,
            node=index,
            log=layout.log_file(f"{TRAINER}-{position}.stdout") if position else spec.log,
            env={**spec.env, **(place.environment() if several else {})},
            env_defaults={**defaults, **(_interfaces(node) if several else {})},
            reports=reports[first : first + per_node],
            records_end=position == 0,
        )


def _env_nodes(config: RLConfig, placement: Placement, own: Node) -> EnvNodesConfig | None:
    if not placement.has_distant_workers:
        return None
    return EnvNodesConfig(
        own=own.index,
        num_required=config.deployment.num_env_nodes or len(placement.worker_nodes),
        max_nodes=placement.num_nodes,
        host=own.host,
        port=own.ports[ENVIRONMENTS],
        drain_timeout_s=_DRAIN_SHARE * config.recovery.preemption_grace_s,
    )


def _worker_processes(
    config: RLConfig, python: str, file: Path, *, placement: Placement, known: Container[int]
) -> Iterator[ProcessSpec]:
    """Yield the process of each known node that runs environment workers. The orchestrator runs them itself if no other does."""
    for node in filter(known.__contains__, placement.worker_nodes if placement.has_distant_workers else ()):
        module, words = "trivet.orchestrator.environment_node", ("--env-nodes.own", str(node))
        spec = role_process(f"env-workers-{node}", module, config, python, file, *words, env=server_keys(config))
        yield replace(spec, node=node, work=_ENVIRONMENTS)


def _interfaces(node: Node) -> dict[str, str]:
    """Return where ranks of several nodes connect: through the interface that reaches the driver. Unknown: as libraries choose."""
    return dict.fromkeys(_LOOPBACK, node.interface) if node.interface else {}
