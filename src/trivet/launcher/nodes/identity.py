"""Finds out which node of a run this process is: from its configuration, else from what a scheduler has set. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from trivet.config.schema.deployment import DeploymentConfig
from trivet.errors import ConfigError
from trivet.schedulers.node_variables import (
    JOB_HEAD,
    JOB_INDEX,
    JOB_NODES,
    JOB_SIZE,
    NODE_BASE,
    POD_INDEX,
    SKYPILOT_HOSTS,
    SKYPILOT_INDEX,
    SLURM_INDEX,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """This node among those of the run."""

    index: int
    head: str | None
    """The name or address by which the scheduler knows the first node; None: it does not say."""
    source: str
    """Where this is from, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheduler:
    name: str
    index: str
    """The variable with the node's number."""
    count: str
    """The variable with the number of nodes."""
    head: str
    """The variable with the first node's host; of several lines or words the first counts."""


_SCHEDULERS = (
    _Scheduler(name="SkyPilot", index=SKYPILOT_INDEX, count="SKYPILOT_NUM_NODES", head=SKYPILOT_HOSTS),
    _Scheduler(name="LeaderWorkerSet", index="LWS_WORKER_INDEX", count="LWS_GROUP_SIZE", head="LWS_LEADER_ADDRESS"),
    _Scheduler(name="Kubeflow", index="PET_NODE_RANK", count="PET_NNODES", head="PET_MASTER_ADDR"),
    # The last: a cloud's machines may themselves be jobs of SLURM. Its first task runs where the job's script does.
    _Scheduler(name="SLURM", index=SLURM_INDEX, count="SLURM_NTASKS", head="SLURM_LAUNCH_NODE_IPADDR"),
)


def identify_node(deployment: DeploymentConfig, environ: Mapping[str, str]) -> NodeIdentity:
    """Return which node this is: what `deployment.node_rank` says, else the first scheduler that has set its variables.

    Raises:
        ConfigError: nothing says it, or the scheduler gave another number of nodes than the configuration asks for.
    """
    if deployment.node_rank is not None:
        found, num_nodes = NodeIdentity(index=deployment.node_rank, head=None, source="deployment.node_rank"), None
    elif NODE_BASE in environ:
        names = (NODE_BASE, JOB_INDEX, JOB_SIZE, POD_INDEX, JOB_NODES)
        base, job, size, pod, num_nodes = (_number(environ, name) for name in names)
        found = NodeIdentity(index=base + job * size + pod, head=environ.get(JOB_HEAD), source="JobSet")
    else:
        scheduler = next((each for each in _SCHEDULERS if each.index in environ), None)
        if scheduler is None:
            raise ConfigError(
                'deployment.type is "multi_node", and nothing says which node this is: start the command on each node with'
                " --deployment.node-rank 0, 1, 2 and so on, or through SLURM, a JobSet, Kubeflow or SkyPilot, which say it"
            )
        head = (environ.get(scheduler.head) or "").split()
        found = NodeIdentity(index=_number(environ, scheduler.index), head=head[0] if head else None, source=scheduler.name)
        num_nodes = _number(environ, scheduler.count) if scheduler.count in environ else None
    if num_nodes is not None and num_nodes != deployment.num_nodes:
        raise ConfigError(
            f"the configuration has {deployment.num_nodes} nodes ({deployment.num_train_nodes} that train and"
            f" {deployment.num_serving_nodes} that serve), and {found.source} started {num_nodes}: ask it for"
            f" {deployment.num_nodes}, with one task on each, or change [deployment]"
        )
    if found.index >= deployment.num_nodes:
        raise ConfigError(
            f"this is node {found.index} ({found.source}), and the configuration has nodes 0 to {deployment.num_nodes - 1}:"
            " change [deployment], or start fewer"
        )
    return found


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r} where the number of this node or of all nodes should be: set --deployment.node-rank on each"
        )
    return int(text)
