"""Section for a command that pods of Kubernetes carry out, as one JobSet."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from trivet.config.sections.base import MAX_PROCESSES, Section
from trivet.config.sections.remote import JobName, Label, RemotePath, Variable, require_no_secrets

ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""The name of an object that is there already."""
KeyOfSecret = Annotated[str, StringConstraints(pattern=r"^[-a-z0-9.]+/[-A-Za-z0-9._]+$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?([KMGT]i?)?$")]
"""An amount of memory, as Kubernetes takes it: `64Gi`."""


class KubernetesConfig(Section):
    """The table that has a command written as a JobSet to output_dir/kubernetes. The user starts it with `kubectl apply`."""

    image: str = Field(min_length=1)
    """Container image with trivet in it, such as one built from scripts/Dockerfile."""
    volume_claim: ObjectName
    """Claim of the volume that all pods write to (ReadWriteMany). It must hold output_dir: other files go with their pod."""
    volume_path: RemotePath = Path("/runs")
    """Where the pods have the volume."""
    working_dir: RemotePath | None = None
    """Directory in which the pods run the command; output_dir and other relative paths are relative to it. Unset: volume_path."""
    name: JobName = "trivet"
    """Name of the JobSet, its ConfigMap and the DNS domain of its pods."""
    namespace: Label = "default"
    """Namespace of both, and of the claim and the secrets."""
    python: str = Field(default="python", min_length=1)
    """The interpreter in the image."""
    queue: Label | None = None
    """Queue of Kueue, which holds the JobSet back until all its pods have a place. Unset: none."""
    service_account: ObjectName | None = None
    """Service account of the pods; unset: the namespace's default."""
    node_selector: dict[str, str] = {}
    """Labels that the machines must have."""
    tolerations: list[dict[str, Any]] = []
    """Taints of machines that the pods tolerate, as Kubernetes spells them."""
    env: dict[Variable, str] = {}
    """Environment variables of the pods. The manifest shows them, so names that sound like a secret's are refused."""
    secret_env: dict[Variable, KeyOfSecret] = {}
    """Environment variables from keys of secrets that are there already: `WANDB_API_KEY = "wandb/key"`."""
    cpus: int | None = Field(default=None, ge=1)
    """Cores of each pod; unset: no limit."""
    memory: Quantity | None = None
    """Memory of each pod; unset: no limit."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=MAX_PROCESSES)
    """GPUs of each pod; unset: those that the configuration names. 0 for a run on CPUs."""
    gpu_resource: str = Field(default="nvidia.com/gpu", min_length=1)
    """Name under which the cluster counts GPUs."""
    shm_size: Quantity = "16Gi"
    """Most that /dev/shm may hold, which counts as memory of the pod: NCCL and vLLM have their buffers there."""
    max_restarts: int = Field(default=3, ge=0, le=MAX_PROCESSES)
    """Restarts of all pods together, after a failure or an eviction; the command goes on from its newest commit. Exit codes 2 and 3
    (a bad configuration, a loss that is not finite) restart nothing."""
    max_server_restarts: int = Field(default=100, ge=0, le=MAX_PROCESSES)
    """New pods for a node that serves, while the others go on; one more loss restarts all."""
    pod_overrides: dict[str, Any] = {}
    """Merged last into the specification of every pod, for what has no key here. Tables are merged key by key; containers, volumes
    and variables by name; other lists are replaced."""

    @model_validator(mode="after")
    def _variables_fit(self) -> "KubernetesConfig":
        require_no_secrets(self.env, given=self.secret_env, instead='secret_env = {{ {} = "SECRET/KEY" }}')
        return self
