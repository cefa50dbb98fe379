"""Writes a command as the manifest of a Job, or of a RayJob or JobSet whose pods are its nodes. Nothing here talks to a cluster.

A command on one node is a plain Job. A run over several nodes is a RayJob (`schedulers.rayjob`), or with deployment.engine =
"agents" a JobSet. All run `schedulers.job`. The exit codes 2 and 3 fail a Job or JobSet at once.

In a JobSet the pods that train are the Job `trainer`, whose first pod leads the run; each node that serves is a Job `inference` of
one pod. Every pod learns from variables which node it is and after how many restarts. The set is over when `trainer` is. A failed
pod that trains has the set start again; a failed pod that serves is replaced alone.

Fields: jobset.x-k8s.io/v1alpha2, batch/v1 and v1.
"""

import math
import os.path
import secrets
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.load import LoadedConfig
from trivet.config.schema.deployment import DeploymentConfig, KubernetesConfig, SlurmCommand
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.errors import ConfigError, Diverged
from trivet.process.lifetime import module_command
from trivet.schedulers import rayjob
from trivet.schedulers.documents import merge, to_yaml, without_none
from trivet.schedulers.node_variables import JOB_HEAD, JOB_INDEX, JOB_NODES, JOB_SIZE, NODE_BASE, RESTARTS, SET_ID
from trivet.schedulers.preparation import (
    Submittable,
    commit_time_s,
    count_gpus,
    count_nodes,
    require_below,
    require_commits,
    require_no_secret_variable,
    require_nothing_hidden,
    show_resolved,
    write_files,
)
from trivet.storage.durable import hash_bytes

_TRAINER, _INFERENCE = "trainer", "inference"
_CONFIGURATION = Path("/run/trivet")
"""Where the pods have the ConfigMap. /run is empty in an image, so it hides nothing."""
_LABELS = "metadata.labels['jobset.sigs.k8s.io/{}']"
_JOB_LABEL = "metadata.labels['batch.kubernetes.io/controller-uid']"
FINAL_CODES = (ConfigError.exit_code, Diverged.exit_code)
"""Exit codes that every further start would repeat."""
_FINAL_RULE = {
    "action": "FailJob",
    "onExitCodes": {"containerName": "trivet", "operator": "In", "values": list(FINAL_CODES)},
}
_JOB_ID = "JOB_UID"
"""Variable with the id of the Job, which no other one has."""
_MARGIN_S = 30
"""Seconds that a pod has to end beyond those of the commit: Python starts and stops, and a file system over a network is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeGroup:
    """Nodes of one kind: Jobs of a JobSet that differ in their number alone."""

    name: str
    num_jobs: int
    num_pods: int
    """Pods of each of these Jobs."""
    first_node: int
    max_pod_failures: int


def write(loaded: LoadedConfig[Submittable], *, command: SlurmCommand, is_dry_run: bool) -> int:
    """Write manifest and configuration of a command with a table [kubernetes], and print how to start it; return the exit code.

    Args:
        is_dry_run: show the resolved configuration too.

    Raises:
        ConfigError: the table and other keys do not fit together, or the files cannot be written.
    """
    config = loaded.config
    assert not isinstance(config, EvalConfig)
    assert config.kubernetes is not None
    _check(config, config.kubernetes)
    directory = RunLayout(config.output_dir).kubernetes
    text = to_toml(config.model_copy(update={"kubernetes": None}))
    documents = make_manifest(config, command=command, configuration=text)
    manifest = directory / f"{documents[-1]['kind'].lower()}.yaml"
    write_files(directory, {directory / f"{command}.toml": text, manifest: to_yaml(documents)})
    if is_dry_run:
        show_resolved(loaded)
    print(f"{'# ' if is_dry_run else ''}wrote {manifest}; start it with: kubectl apply -f {shlex.quote(str(manifest))}")
    return 0


def _check(config: RLConfig | SftConfig, kubernetes: KubernetesConfig) -> None:
    require_below(config, kubernetes.volume_path, working_dir=_working_dir(kubernetes), key="kubernetes.volume_path")
    require_nothing_hidden(config, file="manifest", instead="kubernetes.secret_env")
    require_no_secret_variable(kubernetes.pod_overrides, key="kubernetes.pod_overrides", instead="kubernetes.secret_env")
    if kubernetes.max_restarts:
        require_commits(config, restarted_by="kubernetes.max_restarts", otherwise=", or kubernetes.max_restarts = 0")


def _working_dir(kubernetes: KubernetesConfig) -> Path:
    return kubernetes.working_dir or kubernetes.volume_path


def make_manifest(config: RLConfig | SftConfig, *, command: SlurmCommand, configuration: str) -> list[dict[str, Any]]:
    """Return the ConfigMap of a command, and its Job, RayJob or JobSet.

    Args:
        configuration: text of the resolved configuration that the pods read.
    """
    kubernetes = config.kubernetes
    assert kubernetes is not None
    # A name of its own for each text: a live job, whose pods read it when they start again, keeps the one that it was made with.
    config_map = f"{kubernetes.name}-{hash_bytes(configuration.encode()).xxh3_128[:8]}"
    metadata = {"name": kubernetes.name, "namespace": kubernetes.namespace}
    queue = {"labels": {"kueue.x-k8s.io/queue-name": kubernetes.queue}} if kubernetes.queue is not None else {}
    deployment = config.deployment if isinstance(config, RLConfig) and config.deployment.is_multi_node else None
    if deployment is None:
        version, kind, spec = "batch/v1", "Job", _job(config, kubernetes, command=command, config_map=config_map)
    elif deployment.engine == "ray":
        version, kind, spec = "ray.io/v1", "RayJob", _ray_job(config, kubernetes, deployment, command, config_map)
    else:
        version, kind = "jobset.x-k8s.io/v1alpha2", "JobSet"
        spec = _job_set(config, kubernetes, command=command, config_map=config_map)
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {**metadata, "name": config_map},
            "immutable": True,
            "data": {f"{command}.toml": configuration},
        },
        {"apiVersion": version, "kind": kind, "metadata": {**metadata, **queue}, "spec": spec},
    ]


def _job(
    config: RLConfig | SftConfig, kubernetes: KubernetesConfig, *, command: SlurmCommand, config_map: str
) -> dict[str, Any]:
    words = [*_task(kubernetes, command), _literal(str(_notes(config, kubernetes))) + f"-$({_JOB_ID}).pid"]
    variables = [*_user_variables(kubernetes), {"name": _JOB_ID, "valueFrom": {"fieldRef": {"fieldPath": _JOB_LABEL}}}]
    pod = _pod(config, kubernetes, config_map=config_map, variables=variables, words=words)
    return {
        "backoffLimit": kubernetes.max_restarts,
        "podFailurePolicy": {"rules": [_FINAL_RULE]},
        "podReplacementPolicy": "Failed",  # two starts never share the output directory
        "template": {"spec": pod},
    }


def _ray_job(
    config: RLConfig | SftConfig,
    kubernetes: KubernetesConfig,
    deployment: DeploymentConfig,
    command: SlurmCommand,
    config_map: str,
) -> dict[str, Any]:
    def make_pod(num_gpus: int, cpus: int | None, own: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        named = [{"name": name, "value": value} for name, value in {**rayjob.VARIABLES, **own}.items()]
        variables = [*named, *_user_variables(kubernetes)]
        return _pod(config, kubernetes, config_map=config_map, variables=variables, num_gpus=num_gpus, cpus=cpus)

    # Nothing in a pod tells this RayJob from another one of its name, so the notes have an id of their own.
    pid_file = f"{os.path.normpath(_working_dir(kubernetes) / _notes(config, kubernetes))}-{secrets.token_hex(4)}.pid"
    task = module_command("trivet.schedulers.job", command, str(_CONFIGURATION / f"{command}.toml"), python=kubernetes.python)
    return rayjob.make_spec(
        deployment,
        entrypoint=["env", "-C", str(_working_dir(kubernetes)), *task, "--pid-file", pid_file, "--heed-final-code"],
        max_restarts=kubernetes.max_restarts,
        num_gpus=count_gpus(config, asked=kubernetes.gpus_per_node),
        make_pod=make_pod,
        head=make_pod(0, None, {rayjob.STOP_WAIT: str(_grace_s(config))}),
    )


def _job_set(
    config: RLConfig | SftConfig, kubernetes: KubernetesConfig, *, command: SlurmCommand, config_map: str
) -> dict[str, Any]:
    final = {
        "name": "finalExitCode",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": [_TRAINER],
    }
    return {
        # The nodes find each other while they start, before they count as ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": kubernetes.name},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [_TRAINER]},
        "failurePolicy": {
            "maxRestarts": kubernetes.max_restarts,
            "restartStrategy": "BlockingRecreate",  # two starts never share the output directory
            "rules": [final],
        },
        "replicatedJobs": [
            _replicated_job(config, group, command=command, config_map=config_map) for group in _groups(config, kubernetes)
        ],
    }


def _groups(config: RLConfig | SftConfig, kubernetes: KubernetesConfig) -> Iterator[_NodeGroup]:
    deployment = config.deployment if isinstance(config, RLConfig) and config.deployment.is_multi_node else None
    num_training = deployment.num_train_nodes if deployment is not None else 1
    yield _NodeGroup(name=_TRAINER, num_jobs=1, num_pods=num_training, first_node=0, max_pod_failures=0)
    if deployment is not None and deployment.num_serving_nodes:
        yield _NodeGroup(
            name=_INFERENCE,
            num_jobs=deployment.num_serving_nodes,
            num_pods=1,
            first_node=num_training,
            max_pod_failures=kubernetes.max_server_restarts,
        )


def _replicated_job(
    config: RLConfig | SftConfig, group: _NodeGroup, *, command: SlurmCommand, config_map: str
) -> dict[str, Any]:
    kubernetes = config.kubernetes
    assert kubernetes is not None
    words = [*_task(kubernetes, command), _literal(str(_notes(config, kubernetes))) + f"-$({SET_ID}).pid"]
    variables = [*_user_variables(kubernetes), *_set_variables(config, kubernetes, group)]
    pod = _pod(config, kubernetes, config_map=config_map, variables=variables, words=words)
    # Only the first pod decides what is final: the others never end with such a code (`node_variables.pod_exit_code`).
    policy = {"podFailurePolicy": {"rules": [_FINAL_RULE]}} if group.name == _TRAINER else {}
    return {
        "name": group.name,
        "replicas": group.num_jobs,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "parallelism": group.num_pods,
                "completions": group.num_pods,
                "backoffLimit": group.max_pod_failures,
                **policy,
                "template": {"spec": pod},
            }
        },
    }


def _notes(config: RLConfig | SftConfig, kubernetes: KubernetesConfig) -> Path:
    """Return the beginning of the names of the notes that a job leaves for its later starts."""
    return RunLayout(config.output_dir).kubernetes / kubernetes.name


def _task(kubernetes: KubernetesConfig, command: SlurmCommand) -> list[str]:
    task = module_command("trivet.schedulers.job", command, str(_CONFIGURATION / f"{command}.toml"), python=kubernetes.python)
    return [*map(_literal, task), "--pid-file"]


def _grace_s(config: RLConfig | SftConfig) -> int:
    return math.ceil(commit_time_s(config)) + _MARGIN_S


def _pod(
    config: RLConfig | SftConfig,
    kubernetes: KubernetesConfig,
    *,
    config_map: str,
    variables: list[dict[str, Any]],
    words: list[str] | None = None,
    num_gpus: int | None = None,
    cpus: int | None = None,
) -> dict[str, Any]:
    """Return the specification of a pod.

    Args:
        words: its command. None: KubeRay makes it.
        num_gpus: its GPUs. None: those of a node.
        cpus: its CPUs. None: those of the table [kubernetes].
    """
    limits = {
        "cpu": cpus or kubernetes.cpus,
        "memory": kubernetes.memory,
        kubernetes.gpu_resource: (count_gpus(config, asked=kubernetes.gpus_per_node) if num_gpus is None else num_gpus) or None,
    }
    container = {
        "name": "trivet",
        "image": kubernetes.image,
        **({"command": words} if words is not None else {}),
        "workingDir": str(_working_dir(kubernetes)),
        "env": variables,
        "resources": {"limits": without_none(limits)},
        "volumeMounts": [
            {"name": "configuration", "mountPath": str(_CONFIGURATION), "readOnly": True},
            {"name": "runs", "mountPath": str(kubernetes.volume_path)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = without_none(
        {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _grace_s(config),
            "serviceAccountName": kubernetes.service_account,
            "nodeSelector": kubernetes.node_selector or None,
            "tolerations": kubernetes.tolerations or None,
            "containers": [container],
            "volumes": [
                {"name": "configuration", "configMap": {"name": config_map}},
                {"name": "runs", "persistentVolumeClaim": {"claimName": kubernetes.volume_claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shm_size}},
            ],
        }
    )
    return merge(pod, kubernetes.pod_overrides)


def _user_variables(kubernetes: KubernetesConfig) -> Iterator[dict[str, Any]]:
    for name, value in kubernetes.env.items():
        yield {"name": name, "value": _literal(value)}
    for name, key in kubernetes.secret_env.items():
        secret, _, entry = key.partition("/")
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": entry}}}


def _set_variables(config: RLConfig | SftConfig, kubernetes: KubernetesConfig, group: _NodeGroup) -> Iterator[dict[str, Any]]:
    own = {
        NODE_BASE: str(group.first_node),
        JOB_SIZE: str(group.num_pods),
        JOB_NODES: str(count_nodes(config)),
        JOB_HEAD: f"{kubernetes.name}-{_TRAINER}-0-0.{kubernetes.name}",
    }
    for name, value in own.items():
        yield {"name": name, "value": value}
    for name, label in ((JOB_INDEX, "job-index"), (RESTARTS, "restart-attempt"), (SET_ID, "jobset-uid")):
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": _LABELS.format(label)}}}


def _literal(text: str) -> str:
    """Return what the kubelet reads as `text`: it would replace `$(NAME)`."""
    return text.replace("$", "$$")
