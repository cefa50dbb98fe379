"""Decides which roles each node of a run has. Pure: a configuration in, a placement out, the same on every node."""

from collections.abc import Iterator
from dataclasses import dataclass

from trivet.config.sections.rl import RLConfig

HEAD = 0
"""The node that leads a run: it supervises every process, and is the first of those that train."""
TRANSPORT, RENDEZVOUS = "transport", "rendezvous"
"""Names of what listens on the first node that trains besides servers: the trainer for batches, its ranks for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlacement:
    """The place of one inference server."""

    name: str
    """`inference`, `inference-1` and so on."""
    node: int
    gpu_ids: tuple[int, ...]
    """Positions among the node's GPUs; none on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The nodes of a run and their roles."""

    num_nodes: int
    trainer_nodes: tuple[int, ...]
    """Nodes that train, in the order of their ranks."""
    ranks_per_node: int
    servers: tuple[ServerPlacement, ...]
    orchestrator_node: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the trainer on all nodes."""
        return len(self.trainer_nodes) * self.ranks_per_node

    def listeners_on(self, node: int) -> tuple[str, ...]:
        """Return the names of what listens on `node`; each needs a port there."""
        names = [server.name for server in self.servers if server.node == node]
        if node == self.trainer_nodes[0]:
            names += [TRANSPORT, RENDEZVOUS]
        return tuple(names)

    def roles_on(self, node: int) -> tuple[str, ...]:
        """Describe the roles of `node` for people."""
        roles = [
            f"{server.name} on GPU {_span(server.gpu_ids)}" if server.gpu_ids else server.name
            for server in self.servers
            if server.node == node
        ]
        if node in self.trainer_nodes:
            first = self.trainer_nodes.index(node) * self.ranks_per_node
            roles.append(f"trainer rank {_span(range(first, first + self.ranks_per_node))}")
        if node == self.orchestrator_node:
            roles.append("orchestrator")
        return tuple(roles)


def place(config: RLConfig, *, lost: frozenset[int] = frozenset()) -> Placement:
    """Place the roles of a run of several nodes.

    Args:
        lost: nodes without which the trainer goes on; servers keep their nodes and wait for them.
    """
    deployment = config.deployment
    num_training, per_server = deployment.num_train_nodes, deployment.gpus_per_node // deployment.servers_per_node
    servers: list[ServerPlacement] = []
    for number in range(deployment.num_infer_replicas if config.inference is not None else 0):
        node, slot = divmod(number, deployment.servers_per_node)
        servers.append(
            ServerPlacement(
                name=f"inference-{number}" if number else "inference",
                node=num_training + node,
                gpu_ids=tuple(range(slot * per_server, (slot + 1) * per_server)),
            )
        )
    trainer_nodes = tuple(node for node in range(num_training) if node not in lost)
    return Placement(
        num_nodes=deployment.num_nodes,
        trainer_nodes=trainer_nodes,
        ranks_per_node=deployment.gpus_per_node or config.trainer_cpu_ranks,
        servers=tuple(servers),
        orchestrator_node=servers[0].node if deployment.orchestrator_on_inference and servers else trainer_nodes[0],
    )


def describe_placement(placement: Placement) -> Iterator[str]:
    """Yield a line for each node."""
    for node in range(placement.num_nodes):
        head = " (head)" if node == HEAD else ""
        yield f"node {node}{head}: {', '.join(placement.roles_on(node)) or 'nothing'}"


def _span(numbers: "range | tuple[int, ...]") -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
