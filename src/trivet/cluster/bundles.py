"""Decides which bundles of a Ray cluster the nodes of a run are. Pure: a configuration in, groups of bundles out.

A bundle is a part of a machine; Ray places each group as a whole. The nodes that train are one group, on machines of their own.
Every server and every environment node is a group by itself, so that a lost one is placed again while the others stay.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trivet.config.schema.deployment import DeploymentConfig
from trivet.launcher.placement import Placement

_ROLE_CPUS = 1.0
"""CPUs that a node with roles asks for besides its GPUs. It limits nothing: it keeps a node off a machine that has no free core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleGroup:
    """Bundles that Ray places together."""

    name: str
    """What the nodes of the group do, for people."""
    nodes: tuple[int, ...]
    """The node that each bundle becomes."""
    resources: Mapping[str, float]
    """What Ray must have for each bundle."""
    labels: Mapping[str, str]
    """Labels that the machines must have."""

    @property
    def num_gpus(self) -> float:
        """GPUs of each bundle."""
        return self.resources.get("GPU", 0.0)

    def describe(self) -> str:
        """Return `inference: 1 bundle of 8 GPU, 1 CPU`."""
        parts = ", ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        return f"{self.name}: {len(self.nodes)} bundle{'s' if len(self.nodes) > 1 else ''} of {parts}"


def group_bundles(
    deployment: DeploymentConfig, placement: Placement, *, address: str, machine: Mapping[str, float]
) -> Iterator[BundleGroup]:
    """Yield the groups of all nodes of a run.

    Args:
        address: that of the machine on which a single node that trains belongs.
        machine: what Ray has on that machine. If it does not suffice, the node may be anywhere.
    """
    labels = deployment.ray.labels if deployment.gpus_per_node else {}

    def resources(num_gpus: int) -> dict[str, float]:
        return {**({"GPU": float(num_gpus)} if num_gpus else {}), "CPU": _ROLE_CPUS}

    # First, while the few machines with their resources are free: Ray places groups in their order.
    for node in placement.worker_nodes if placement.has_distant_workers else ():
        amounts = {"CPU": float(deployment.env_cpus_per_node), **deployment.env_resources}
        yield BundleGroup(name=f"env-workers-{node}", nodes=(node,), resources=amounts, labels={})
    trainer = resources(deployment.gpus_per_node)
    if len(placement.trainer_nodes) == 1 and Counter(trainer) <= Counter(machine):
        trainer[f"node:{address}"] = 0.001  # each machine has 1 of this resource, and no other has any
    yield BundleGroup(name="trainer", nodes=placement.trainer_nodes, resources=trainer, labels=labels)
    for server in placement.servers:
        yield BundleGroup(name=server.name, nodes=server.nodes, resources=resources(len(server.gpu_ids)), labels=labels)
