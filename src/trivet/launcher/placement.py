"""Decides which roles each node of a run has. Pure: a configuration in, a placement out."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from trivet.config.schema.rl import RLConfig
from trivet.launcher.plan import ORIGIN, needs_origin

TRANSPORT, RENDEZVOUS, ENVIRONMENTS = "transport", "rendezvous", "environments"
"""Names of the listeners besides servers. On the first node that trains, the trainer listens for batches and its ranks for each
other. On the orchestrator's node, it listens for environment workers of other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlacement:
    """The place of one inference server."""

    name: str
    """`inference`, `inference-1` and so on."""
    nodes: tuple[int, ...]
    """The node of each shard. The first one answers requests."""
    gpu_ids: tuple[int, ...]
    """Positions among the GPUs of each of its nodes; none on the CPU."""

    @property
    def node(self) -> int:
        """The node that answers requests."""
        return self.nodes[0]

    @property
    def rendezvous(self) -> str:
        """The name of the listener on its first node for the ranks of all its nodes."""
        return f"{self.name}-{RENDEZVOUS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes of a run and their roles."""

    num_nodes: int
    trainer_nodes: tuple[int, ...]
    """Nodes that train, in the order of their ranks."""
    ranks_per_node: int
    servers: tuple[ServerPlacement, ...]
    orchestrator_node: int
    worker_nodes: tuple[int, ...]
    """Nodes that run environment workers."""
    has_origin: bool = False
    """True when servers fetch policies from the first node that trains."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the trainer on all nodes."""
        return len(self.trainer_nodes) * self.ranks_per_node

    @property
    def has_distant_workers(self) -> bool:
        """True when environment workers run on other nodes than the orchestrator's."""
        return self.worker_nodes != (self.orchestrator_node,)

    def listeners_on(self, node: int) -> tuple[str, ...]:
        """Return the names of the listeners on `node`; each needs a port there."""
        servers = [server for server in self.servers if server.node == node]
        names = [server.name for server in servers]
        names += [server.rendezvous for server in servers if len(server.nodes) > 1]
        if node == self.trainer_nodes[0]:
            names += [TRANSPORT, RENDEZVOUS, *((ORIGIN,) if self.has_origin else ())]
        if node == self.orchestrator_node and self.has_distant_workers:
            names.append(ENVIRONMENTS)
        return tuple(names)

    def possible_listeners_on(self, node: int) -> tuple[str, ...]:
        """Return the names of the listeners that `node` has now, or has once it is the first of the nodes that train."""
        names = dict.fromkeys(self.listeners_on(node))
        if node in self.trainer_nodes:
            names |= dict.fromkeys(self.listeners_on(self.trainer_nodes[0]))
        return tuple(names)

    def roles_on(self, node: int) -> tuple[str, ...]:
        """Describe the roles of `node` for people."""
        roles = [_describe_server(server, node) for server in self.servers if node in server.nodes]
        if node in self.trainer_nodes:
            first = self.trainer_nodes.index(node) * self.ranks_per_node
            roles.append(f"trainer rank {_span(range(first, first + self.ranks_per_node))}")
        if node == self.orchestrator_node:
            roles.append("orchestrator")
        if node in self.worker_nodes and self.has_distant_workers:
            roles.append("environment workers")
        return tuple(roles)


def place(config: RLConfig, *, lost: frozenset[int] = frozenset(), known: Collection[int] | None = None) -> Placement:
    """Place the roles of a run of several nodes.

    Args:
        lost: nodes without which the trainer goes on; servers keep their nodes and wait for them.
        known: nodes that were there once. Servers beyond num_infer_replicas are left out until theirs were. None: all were.
    """
    deployment = config.deployment
    num_training, per_server = deployment.num_train_nodes, deployment.gpus_per_node // deployment.servers_per_node
    span = deployment.num_infer_nodes
    servers: list[ServerPlacement] = []
    for number in range(deployment.num_servers if config.inference is not None else 0):
        nodes = tuple(range(first := num_training + number * span, first + span))
        if number >= deployment.num_infer_replicas and known is not None and not set(nodes) <= set(known):
            continue
        servers.append(
            ServerPlacement(
                name=f"inference-{number}" if number else "inference",
                nodes=nodes,
                gpu_ids=tuple(range(per_server)),
            )
        )
    trainer_nodes = tuple(node for node in range(num_training) if node not in lost)
    worker_nodes: tuple[int, ...] = ()
    if deployment.num_env_nodes and config.orchestrator.replay is None:
        worker_nodes = tuple(range(num_training + span * deployment.num_servers, deployment.num_nodes))
    orchestrator_node = servers[0].node if deployment.orchestrator_on_inference and servers else trainer_nodes[0]
    return Placement(
        num_nodes=deployment.num_nodes,
        trainer_nodes=trainer_nodes,
        ranks_per_node=deployment.gpus_per_node or config.trainer_cpu_ranks,
        servers=tuple(servers),
        orchestrator_node=orchestrator_node,
        worker_nodes=worker_nodes or (orchestrator_node,),
        has_origin=needs_origin(config),
    )


def nodes_with_own_directory(config: RLConfig) -> frozenset[int]:
    """Return the nodes that need no output directory: with weights over HTTP, those that do not train."""
    deployment = config.deployment
    return frozenset(range(deployment.num_train_nodes, deployment.num_nodes) if needs_origin(config) else ())


def required_nodes(config: RLConfig) -> frozenset[int]:
    """Return the nodes without which a run does not start: others may join it."""
    least = place(config, known=())
    optional = least.worker_nodes[config.deployment.num_env_nodes :] if config.deployment.num_env_nodes else ()
    serving = (node for server in least.servers for node in server.nodes)
    return frozenset((*least.trainer_nodes, *serving, *least.worker_nodes)) - frozenset(optional)


def describe_placement(placement: Placement) -> Iterator[str]:
    """Yield a line for each node."""
    for node in range(placement.num_nodes):
        yield f"node {node}: {', '.join(placement.roles_on(node)) or 'nothing'}"


def _describe_server(server: ServerPlacement, node: int) -> str:
    shard = f" shard {server.nodes.index(node)} of {len(server.nodes)}" if len(server.nodes) > 1 else ""
    return f"{server.name}{shard}" + (f" on GPU {_span(server.gpu_ids)}" if server.gpu_ids else "")


def _span(numbers: "range | tuple[int, ...]") -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
