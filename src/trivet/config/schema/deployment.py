"""Sections about the machines of a run: nodes, restarts, and the schedulers that run a command on other machines."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from trivet.config.masking import names_secret
from trivet.config.schema.base import MAX_PROCESSES, MAX_WAIT_S, Section, refuse_unless


class RecoveryConfig(Section):
    """Inference is restarted alone; trainer and orchestrator go back to the newest checkpoint together."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts within restart_window_s of inference, and of trainer with orchestrator. 0: none. A lost node does not count."""
    restart_window_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """Restarts longer ago than this many seconds no longer count."""
    backoff_s: float = Field(default=1.0, ge=0, le=MAX_WAIT_S)
    """Wait before the first restart within the window, seconds; it doubles with each further one, up to a minute."""
    preemption_grace_s: float = Field(default=60.0, ge=0, le=MAX_WAIT_S)
    """After SIGTERM or SIGHUP the roles have this many seconds to finish the step and commit a checkpoint. 0: stop at once."""
    watchdog_timeout_s: float = Field(default=120.0, gt=2, le=MAX_WAIT_S)
    """A process that has not reported for this many seconds is named as stuck. Each reports every second, whatever it does."""
    stall_warn_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """If no report changed for this long, the log says which role waits for which, and processes log their stacks, seconds."""
    on_stuck: Literal["warn", "restart", "stop"] = "restart"
    """Reaction to a stuck role: only a warning, a restart as if it had died, or the end of the run."""


class RayConfig(Section):
    """The Ray cluster on which a run of several nodes is placed."""

    address: str = Field(default="auto", min_length=1)
    """HOST:PORT of the cluster's head; `auto`: the cluster that this machine has joined. The variable RAY_ADDRESS wins."""
    allow_open: bool = False
    """Use a cluster that answers strangers, who may then run programs on it. Without this it is refused."""
    labels: dict[str, str] = {}
    """Labels that machines with GPUs must have, such as `"ray.io/accelerator-type" = "H100"`."""


class DeploymentConfig(Section):
    """The nodes of a run. Each is a part of a machine of a Ray cluster, on which the command places them."""

    type: Literal["single_node", "multi_node"] = "single_node"
    """`multi_node`: the roles run on a Ray cluster, each on nodes of its own. The command itself needs no GPU."""
    ray: RayConfig = RayConfig()
    num_train_nodes: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Nodes over which the trainer's ranks are spread."""
    num_infer_nodes: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Nodes of one inference server, which inference.parallel.tp divides among them; 0: the run starts none, and
    orchestrator.client.base_url names those that run."""
    num_infer_replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Inference servers. Each is restarted alone, and rollouts go to the least loaded."""
    max_infer_replicas: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Add servers up to this number while the cluster has room; unset: exactly num_infer_replicas."""
    servers_per_node: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Servers that find room in the GPUs of one node: each has gpus_per_node / servers_per_node of them."""
    nodes_per_fsdp_group: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Nodes over which one copy of the trainer's model is sharded, which sets trainer.model.dp_replicate; unset: all that train."""
    orchestrator_on_inference: bool = False
    """Run the orchestrator on the first node that serves instead of the first that trains; its environments too."""
    num_env_nodes: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """Nodes that run environment workers and nothing else; 0: the workers run beside the orchestrator."""
    max_env_nodes: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Add nodes with environment workers up to this number while the cluster has room; unset: exactly num_env_nodes."""
    env_cpus_per_node: int = Field(default=8, ge=1, le=MAX_PROCESSES)
    """CPUs that Ray sets aside for each node with environment workers."""
    env_resources: dict[str, float] = {}
    """Further Ray resources that such a node must have: `{ sandbox = 1 }` for machines that were started with that resource."""
    gpus_per_node: int = Field(default=8, ge=0, le=MAX_PROCESSES)
    """GPUs of each node that trains or serves. 0: nodes without GPUs, on each of which trainer_cpu_ranks ranks train."""
    min_train_nodes: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Go on with this many nodes that train when others are lost and do not return; unset: all are needed."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """How long the run waits at its start until Ray has placed its nodes."""
    lost_after_s: float = Field(default=30.0, ge=10, le=MAX_WAIT_S)
    """A node that has answered nothing for this long counts as lost. It ends its processes itself after half of this time."""
    return_timeout_s: float = Field(default=120.0, ge=0, le=MAX_WAIT_S)
    """How long the run waits for a node that it needs; then it ends with exit code 75, and the scheduler may start it again."""

    def _problems(self) -> Iterator[str]:
        if self.type == "single_node":
            # A resolved configuration names all keys, so those with their default values do not count.
            changed = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
            if given := sorted(changed - {"gpus_per_node"}):
                yield f'{", ".join(given)} need type = "multi_node"; set it, or remove them'
            return
        if (self.max_infer_replicas or self.num_infer_replicas) < self.num_infer_replicas:
            yield f"max_infer_replicas ({self.max_infer_replicas}) must be >= num_infer_replicas ({self.num_infer_replicas})"
        if self.max_env_nodes is not None and not 0 < self.num_env_nodes <= self.max_env_nodes:
            yield f"max_env_nodes ({self.max_env_nodes}) must be >= num_env_nodes ({self.num_env_nodes}), and that at least 1"
        if self.servers_per_node > 1 and self.num_infer_nodes > 1:
            yield (f"a server of num_infer_nodes = {self.num_infer_nodes} has its nodes to itself; remove servers_per_node")
        if self.gpus_per_node % self.servers_per_node:
            yield (
                f"servers_per_node ({self.servers_per_node}) must divide gpus_per_node ({self.gpus_per_node}): each server of a"
                " node has as many GPUs as the others"
            )
        group = self.nodes_per_fsdp_group
        if group is not None and self.num_train_nodes % group:
            yield f"nodes_per_fsdp_group ({group}) must divide num_train_nodes ({self.num_train_nodes})"
        if (self.min_train_nodes or 1) > self.num_train_nodes:
            yield f"min_train_nodes ({self.min_train_nodes}) must be <= num_train_nodes ({self.num_train_nodes})"
        if self.orchestrator_on_inference and self.num_infer_nodes == 0:
            yield "orchestrator_on_inference needs a node that serves; raise num_infer_nodes or remove it"

    @property
    def num_servers(self) -> int:
        """The most servers that the run may have."""
        return max(self.num_infer_replicas, self.max_infer_replicas or 0) if self.num_infer_nodes else 0

    @property
    def is_multi_node(self) -> bool:
        """True when a run may have more than one node."""
        return self.type == "multi_node"

    @property
    def num_nodes(self) -> int:
        """The most nodes that the run may have."""
        if not self.is_multi_node:
            return 1
        num_serving = self.num_infer_nodes * self.num_servers
        return self.num_train_nodes + num_serving + max(self.num_env_nodes, self.max_env_nodes or 0)


Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A DNS label (RFC 1035): a lower-case letter, then lower-case letters, digits and dashes, at most 63 characters."""
JobName = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
"""A `Label` of at most 40 characters: the name of a pod, `NAME-inference-4095-0-abcde`, has at most 63."""
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of an environment variable."""


RemotePath = Annotated[
    Path,
    refuse_unless(
        lambda path: path.is_absolute() and ".." not in path.parts,
        "must be an absolute path without ..: it is one on the machines of the job",
    ),
]


def _secret_problems(env: Iterable[str], *, given: Iterable[str], instead: str) -> Iterator[str]:
    """Yield the problems of variables in `env`, whose values a file shows to others.

    Args:
        given: the names of variables that are among the secrets.
        instead: the TOML to write in place of a secret variable, a format string with `{}` for its name.
    """
    if both := sorted(set(env) & set(given)):
        yield f"{', '.join(both)}: in env and among the secrets; keep one of each"
    if secret := sorted(name for name in env if names_secret(name)):
        remedy = instead.format(secret[0])
        yield f"{', '.join(secret)} in env may be secret, and the file would show it; write in its place: {remedy}"


OneLine = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\n\r\x00]*$")]
"""Text without line breaks, because it becomes part of a directive in a batch script."""
SlurmCommand = Literal["rl", "sft", "eval"]
"""The commands that can be jobs."""


class SlurmConfig(Section):
    """If set, the command is written as a batch script to output_dir/slurm and submitted. The job runs the command."""

    job_name: OneLine = "trivet"
    """Name that squeue shows."""
    project_dir: Path = Path()
    """Directory in which the job runs, which the node must see too; paths are relative to it."""
    partition: OneLine | None = None
    """Unset: the cluster's default, as for every key here that has none."""
    account: OneLine | None = None
    """Account that the time is charged to."""
    qos: OneLine | None = None
    """Quality of service."""
    constraint: OneLine | None = None
    """Features that the node must have."""
    nodelist: OneLine | None = None
    """Nodes to choose from."""
    exclude: OneLine | None = None
    """Nodes not to choose."""
    time: OneLine | None = None
    """Time limit, as sbatch takes it: `4:00:00`, `2-12`."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=MAX_PROCESSES)
    """GPUs to ask for; unset: those that the configuration names. 0 for a run on CPUs."""
    cpus_per_task: int | None = Field(default=None, ge=1)
    """Cores of the run on each node, all roles together. Unset and not exclusive: one, with most clusters."""
    mem: OneLine | None = None
    """Memory of the run on each node, all roles together, as sbatch takes it: `64G`."""
    exclusive: bool = False
    """Take whole nodes."""
    pre_run_command: str | None = None
    """Shell text that runs on the node before the command, such as `module load cuda`."""
    requeue: bool = True
    """Queue the job again after its time limit, a node failure or a failure that may pass. It resumes the newest commit."""
    signal_seconds: int = Field(default=300, ge=1, le=65_535)
    """Seconds before the time limit at which the command is asked to end; SLURM may ask up to a minute earlier."""
    srun_args: list[OneLine] = []
    """Words for srun, such as the flags of a container plug-in."""
    sbatch_args: list[OneLine] = []
    """Further directives of the script, a line each: `--mail-type=END`."""


ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""The name of an object that exists in the cluster."""
KeyOfSecret = Annotated[str, StringConstraints(pattern=r"^[-a-z0-9.]+/[-A-Za-z0-9._]+$")]
"""A key in a Kubernetes secret: `SECRET/KEY`."""
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?([KMGT]i?)?$")]
"""An amount of memory, as Kubernetes takes it: `64Gi`."""


class KubernetesConfig(Section):
    """If set, a RayJob, or a Job of one pod, is written to output_dir/kubernetes. The user starts it with `kubectl apply`."""

    image: str = Field(min_length=1)
    """Container image with trivet in it, such as one built from scripts/Dockerfile."""
    volume_claim: ObjectName
    """Claim of the volume that all pods write to (ReadWriteMany). It must hold output_dir: other files go with their pod."""
    volume_path: RemotePath = Path("/runs")
    """Path of the volume in the pods."""
    working_dir: RemotePath | None = None
    """Directory in which the pods run the command; output_dir and other relative paths are relative to it. Unset: volume_path."""
    name: JobName = "trivet"
    """Name of the RayJob or Job, and of its ConfigMap."""
    namespace: Label = "default"
    """Namespace of both, and of the claim and the secrets."""
    python: str = Field(default="python", min_length=1)
    """The interpreter in the image."""
    queue: Label | None = None
    """Queue of Kueue, which holds the job back until all its pods have a place. Unset: none."""
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
    """Restarts of all pods together, from the newest commit. Exit codes 2 (bad configuration) and 3 (diverged) restart nothing."""
    pod_overrides: dict[str, Any] = {}
    """Merged last into the specification of every pod, such as `{ nodeSelector = { pool = "a" } }`: tables key by key, containers,
    volumes and variables by name."""

    def _problems(self) -> Iterator[str]:
        return _secret_problems(self.env, given=self.secret_env, instead='secret_env = {{ {} = "SECRET/KEY" }}')


class SkyPilotConfig(Section):
    """If set, the command is written as a task to output_dir/skypilot. The user starts it with `sky jobs launch`."""

    working_dir: RemotePath
    """Directory of the command on the nodes, on a volume that all share and that outlives them; task_overrides names it."""
    name: JobName = "trivet"
    """Name of the task."""
    accelerator: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Kind of the GPUs, such as `H100`; needed unless the run is one on CPUs."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=MAX_PROCESSES)
    """GPUs of each node; unset: those that the configuration names. 0 for a run on CPUs."""
    image: str | None = Field(default=None, min_length=1)
    """Container image with trivet in it, such as one built from scripts/Dockerfile. Unset: setup installs trivet."""
    setup: str | None = Field(default=None, min_length=1)
    """Shell text that prepares a node before the command; unset: nothing."""
    python: str = Field(default="python", min_length=1)
    """The interpreter on the nodes."""
    env: dict[Variable, str] = {}
    """Environment variables of the nodes. The task shows them, so names that sound like a secret's are refused."""
    secrets: list[Variable] = []
    """Environment variables whose values `sky jobs launch --secret NAME` takes from where it is typed."""
    task_overrides: dict[str, Any] = {}
    """Merged last into the task, such as `{ resources = { cpus = "8+" } }`: tables key by key, lists of named tables by name."""

    def _problems(self) -> Iterator[str]:
        return _secret_problems(self.env, given=self.secrets, instead='secrets = ["{}"]')
