"""Section for the machines of a run: how many nodes, and which roles they have."""

from typing import Literal

from pydantic import Field, model_validator

from trivet.config.sections.addresses import Host
from trivet.config.sections.base import MAX_PROCESSES, MAX_WAIT_S, Section


class DeploymentConfig(Section):
    """The nodes of a run. Every node runs the same command; the first one's exit code is that of the run."""

    type: Literal["single_node", "multi_node"] = "single_node"
    """`multi_node`: nodes either train or serve. The first num_train_nodes train, and the first of all leads the run."""
    num_train_nodes: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Nodes over which the trainer's ranks are spread."""
    num_infer_nodes: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Nodes of one inference server, which inference.parallel.tp divides among them; 0: the run starts none, and
    orchestrator.client.base_url names those that run."""
    num_infer_replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Inference servers. Each is restarted alone, and rollouts go to the least loaded."""
    servers_per_node: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Servers that share a node and its GPUs."""
    nodes_per_fsdp_group: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Nodes over which one copy of the trainer's model is sharded, which sets trainer.model.dp_replicate; unset: all that train."""
    orchestrator_on_inference: bool = False
    """Run the orchestrator, and environments without nodes of their own, on the first node that serves instead of the first that
    trains."""
    env_worker_nodes: list[int] | None = None
    """Numbers of the nodes that run environment workers, orchestrator.workers_per_env of each environment on each; unset: the
    orchestrator's node. A group runs on the node with the fewest pending ones."""
    gpus_per_node: int = Field(default=8, ge=0, le=MAX_PROCESSES)
    """GPUs of each node, all of which its role uses. 0: nodes without GPUs, on each of which trainer_cpu_ranks ranks train."""
    min_train_nodes: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Go on with this many nodes that train when others are lost and do not return; unset: all are needed."""
    node_rank: int | None = Field(default=None, ge=0, lt=MAX_PROCESSES)
    """The number of this node, from 0. Unset: SLURM, JobSet, Kubeflow or SkyPilot has told it."""
    host: Host | None = None
    """The address at which other nodes reach this one. Unset: that of the interface through which it reaches the first node; on the
    first node the scheduler's name for it, else the address of the interface with the default route."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first node to which the others connect; 0: any that is free. output_dir/.control.json tells it to them."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """How long the nodes wait for each other at the start."""
    lost_after_s: float = Field(default=30.0, ge=10, le=MAX_WAIT_S)
    """A node that has said nothing for this long counts as lost. It ends its processes sooner, and itself after twice as long."""
    return_timeout_s: float = Field(default=120.0, ge=0, le=MAX_WAIT_S)
    """How long a run that cannot go on without a lost node waits for its return. Then it ends with exit code 75, and the scheduler
    may start it again."""

    @model_validator(mode="after")
    def _fits_together(self) -> "DeploymentConfig":
        if self.type == "single_node":
            if given := sorted(self.model_fields_set - {"type", "gpus_per_node"} - _defaults_of(self)):
                raise ValueError(f'{", ".join(given)} need type = "multi_node"; set it, or remove them')
            return self
        if self.servers_per_node > 1 and self.num_infer_nodes > 1:
            raise ValueError(
                f"a server of num_infer_nodes = {self.num_infer_nodes} has its nodes to itself; remove servers_per_node"
            )
        if self.gpus_per_node % self.servers_per_node:
            raise ValueError(
                f"servers_per_node ({self.servers_per_node}) must divide gpus_per_node ({self.gpus_per_node}): each server of a"
                " node has as many GPUs as the others"
            )
        group = self.nodes_per_fsdp_group
        if group is not None and self.num_train_nodes % group:
            raise ValueError(f"nodes_per_fsdp_group ({group}) must divide num_train_nodes ({self.num_train_nodes})")
        if (self.min_train_nodes or 1) > self.num_train_nodes:
            raise ValueError(f"min_train_nodes ({self.min_train_nodes}) must be <= num_train_nodes ({self.num_train_nodes})")
        if self.orchestrator_on_inference and self.num_infer_nodes == 0:
            raise ValueError("orchestrator_on_inference needs a node that serves; raise num_infer_nodes or remove it")
        workers = self.env_worker_nodes
        if workers is not None and not (
            workers and set(workers) <= set(range(self.num_nodes)) and len(set(workers)) == len(workers)
        ):
            raise ValueError(
                f"env_worker_nodes = {workers} must name nodes of the run, each once: there are nodes 0 to {self.num_nodes - 1}"
            )
        return self

    @property
    def is_multi_node(self) -> bool:
        """True when a run may have more than one node."""
        return self.type == "multi_node"

    @property
    def num_serving_nodes(self) -> int:
        """The nodes that serve."""
        return -(-self.num_infer_nodes * self.num_infer_replicas // self.servers_per_node)

    @property
    def num_nodes(self) -> int:
        """All nodes of the run."""
        return self.num_train_nodes + self.num_serving_nodes if self.is_multi_node else 1


def _defaults_of(config: DeploymentConfig) -> set[str]:
    """Return the keys whose values are the default ones: a resolved configuration names them all."""
    return {name for name, field in DeploymentConfig.model_fields.items() if getattr(config, name) == field.default}
