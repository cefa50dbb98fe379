"""Writes a command as the manifest of a Job, or of a RayJob whose pods are its nodes. Nothing here talks to a cluster.

A command on one node is a plain Job, which its exit codes 2 and 3 fail at once. A run over several nodes is a RayJob. Its head pod
runs the driver and nothing else. Each pod of a worker group offers Ray what a node of the run asks for. KubeRay replaces lost pods,
and after any failure of the driver it makes a new cluster, at most `backoffLimit` times. Both run `schedulers.job`.

Fields: batch/v1, v1, and ray.io/v1 as published with KubeRay 1.7.
"""

import json
import math
import os.path
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trivet.config.dump import to_toml
from trivet.config.layout import RunLayout
from trivet.config.schema.deployment import KubernetesConfig, SlurmCommand
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.process.lifetime import module_command
from trivet.schedulers.documents import merge, to_yaml, without_none
from trivet.schedulers.preparation import (
    FINAL_CODES,
    RAY_VARIABLES,
    commit_time_s,
    count_gpus,
    count_serving_machines,
    require_commits,
    require_portable,
    write_files,
)
from trivet.storage.durable import hash_bytes

_CONFIGURATION = Path("/run/trivet")
"""Where the pods have the ConfigMap. /run is empty in an image, so it hides nothing."""
_JOB_ID = "JOB_UID"
"""Variable with the id of the Job, which no other one has."""
_JOB_LABEL = "metadata.labels['batch.kubernetes.io/controller-uid']"
_MARGIN_S = 30
"""Seconds that a pod has to end beyond those of the commit: Python starts and stops, and a file system over a network is slow."""
_RAY_VERSION = "2.60.0"
"""KubeRay asks for the version of the image. It tells apart features that all versions of our range have."""
_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Variable of the head: seconds between the request to end that Ray sends the driver, and its kill. Ray's default is 3."""
_COMMIT = """
pid=$(cat {pid_file}) && kill -TERM "$pid" || exit 0
while kill -0 "$pid"; do sleep 1; done
"""
"""The head's preStop hook: it asks the driver to end, and waits for it. Kubernetes then signals the first process, which is Ray's:
with it the roles would end before they have committed."""


def write(config: RLConfig | SftConfig, *, command: SlurmCommand) -> str:
    """Write manifest and configuration of a command with a table [kubernetes]; return how to start it.

    Raises:
        ConfigError: the table and other keys do not fit together, or the files cannot be written.
    """
    kubernetes = config.kubernetes
    assert kubernetes is not None
    require_portable(
        config,
        "kubernetes",
        shared="volume_path",
        working_dir=_working_dir(kubernetes),
        merged="pod_overrides",
        secret="secret_env",
    )
    if kubernetes.max_restarts:
        require_commits(config, restarted_by="kubernetes.max_restarts", otherwise=", or kubernetes.max_restarts = 0")
    directory = RunLayout(config.output_dir).kubernetes
    text = to_toml(config.model_copy(update={"kubernetes": None}))
    documents = make_manifest(config, command=command, configuration=text)
    manifest = directory / f"{documents[-1]['kind'].lower()}.yaml"
    write_files(directory, {directory / f"{command}.toml": text, manifest: to_yaml(documents)})
    return f"wrote {manifest}; start it with: kubectl apply -f {shlex.quote(str(manifest))}"


def make_manifest(config: RLConfig | SftConfig, *, command: SlurmCommand, configuration: str) -> list[dict[str, Any]]:
    """Return the ConfigMap of a command, and its Job or RayJob.

    Args:
        configuration: text of the resolved configuration that the pods read.
    """
    kubernetes = config.kubernetes
    assert kubernetes is not None
    # A name of its own for each text: a live job, whose pods read it when they start again, keeps the one that it was made with.
    config_map = f"{kubernetes.name}-{hash_bytes(configuration.encode()).xxh3_128[:8]}"
    metadata = {"name": kubernetes.name, "namespace": kubernetes.namespace}
    queue = {"labels": {"kueue.x-k8s.io/queue-name": kubernetes.queue}} if kubernetes.queue is not None else {}
    if isinstance(config, RLConfig) and config.deployment.is_multi_node:
        version, kind, spec = "ray.io/v1", "RayJob", _ray_job(config, kubernetes, command=command, config_map=config_map)
    else:
        version, kind, spec = "batch/v1", "Job", _job(config, kubernetes, command=command, config_map=config_map)
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
    words = [
        *map(_literal, _task(kubernetes, command)),
        "--pid-file",
        f"{_literal(_notes(config, kubernetes))}-$({_JOB_ID}).pid",
    ]
    job_id = {"name": _JOB_ID, "valueFrom": {"fieldRef": {"fieldPath": _JOB_LABEL}}}
    final = {"containerName": "trivet", "operator": "In", "values": list(FINAL_CODES)}
    pod = _pod(
        config, kubernetes, config_map=config_map, variables=[*_user_variables(kubernetes), job_id], own={"command": words}
    )
    return {
        "backoffLimit": kubernetes.max_restarts,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "podReplacementPolicy": "Failed",  # two starts never share the output directory
        "template": {"spec": pod},
    }


def _ray_job(config: RLConfig, kubernetes: KubernetesConfig, *, command: SlurmCommand, config_map: str) -> dict[str, Any]:
    # Nothing in a pod tells this RayJob from another one of its name, so the notes have an id of their own.
    pid_file = f"{os.path.normpath(_working_dir(kubernetes) / _notes(config, kubernetes))}-{secrets.token_hex(4)}.pid"
    named = [{"name": name, "value": value} for name, value in RAY_VARIABLES.items()]
    variables = [*named, *_user_variables(kubernetes)]
    make_pod = partial(_pod, config, kubernetes, config_map=config_map)
    head = make_pod(
        variables=[{"name": _STOP_WAIT, "value": str(_grace_s(config))}, *variables],
        own={"lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", _COMMIT.format(pid_file=shlex.quote(pid_file))]}}}},
        num_gpus=0,
    )
    groups = list(_worker_groups(config, kubernetes, make_pod=partial(make_pod, variables=variables)))
    is_elastic = any(group["maxReplicas"] > group["replicas"] for group in groups)
    cluster = {
        "rayVersion": _RAY_VERSION,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True if is_elastic else None,
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": {"spec": head}},
        "workerGroupSpecs": groups,
    }
    entrypoint = ["env", "-C", str(_working_dir(kubernetes)), *_task(kubernetes, command), "--pid-file", pid_file]
    return {
        "entrypoint": shlex.join(entrypoint),
        "submissionMode": "K8sJobMode",
        "backoffLimit": kubernetes.max_restarts,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": without_none(cluster),
    }


def _worker_groups(
    config: RLConfig, kubernetes: KubernetesConfig, *, make_pod: Callable[..., dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    deployment, num_gpus = config.deployment, count_gpus(config, asked=kubernetes.gpus_per_node)
    env_cpus = deployment.env_cpus_per_node if deployment.num_env_nodes else 0
    # A node that trains or serves asks for one CPU (`cluster.bundles`), and any of these pods may train or serve. Without GPUs
    # nothing keeps such nodes off the pods for environments, so all pods are alike and any may be any node.
    role_cpus = max(deployment.servers_per_node, 0 if num_gpus else env_cpus)
    params = {"num-cpus": str(role_cpus), "num-gpus": str(num_gpus)}
    labels = dict(deployment.ray.labels) if num_gpus and deployment.ray.labels else None
    num_serving = count_serving_machines(config, num_servers=deployment.num_infer_replicas)
    counts = {
        "train": (deployment.num_train_nodes, deployment.num_train_nodes),
        "infer": (num_serving, count_serving_machines(config, num_servers=deployment.num_servers)),
    }
    for name, (num, most) in counts.items():
        if num:
            yield _group(name, num=num, most=most, params=params, labels=labels, pod=make_pod())
    if deployment.num_env_nodes:
        resources = {"resources": shlex.quote(json.dumps(deployment.env_resources))} if deployment.env_resources else {}
        yield _group(
            "env",
            num=deployment.num_env_nodes,
            most=deployment.max_env_nodes or deployment.num_env_nodes,
            params={"num-cpus": str(env_cpus), "num-gpus": "0", **resources},
            labels=None,
            pod=make_pod(num_gpus=0, cpus=env_cpus),
        )


def _group(
    name: str, *, num: int, most: int, params: dict[str, str], labels: dict[str, str] | None, pod: dict[str, Any]
) -> dict[str, Any]:
    group = {
        "groupName": name,
        "replicas": num,
        "minReplicas": num,
        "maxReplicas": most,
        "labels": labels,
        "rayStartParams": params,
        "template": {"spec": pod},
    }
    return without_none(group)


def _working_dir(kubernetes: KubernetesConfig) -> Path:
    return kubernetes.working_dir or kubernetes.volume_path


def _notes(config: RLConfig | SftConfig, kubernetes: KubernetesConfig) -> str:
    """Return the beginning of the names of the notes that a job leaves for its later starts."""
    return str(RunLayout(config.output_dir).kubernetes / kubernetes.name)


def _task(kubernetes: KubernetesConfig, command: SlurmCommand) -> list[str]:
    return module_command("trivet.schedulers.job", command, str(_CONFIGURATION / f"{command}.toml"), python=kubernetes.python)


def _grace_s(config: RLConfig | SftConfig) -> int:
    return math.ceil(commit_time_s(config)) + _MARGIN_S


def _pod(
    config: RLConfig | SftConfig,
    kubernetes: KubernetesConfig,
    *,
    config_map: str,
    variables: list[dict[str, Any]],
    own: Mapping[str, Any] = MappingProxyType({}),
    num_gpus: int | None = None,
    cpus: int | None = None,
) -> dict[str, Any]:
    """Return the specification of a pod.

    Args:
        own: fields of its container that others do not have. Without a command, KubeRay makes one.
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
        **own,
        "workingDir": str(_working_dir(kubernetes)),
        "env": variables,
        "resources": {"limits": without_none(limits)},
        "volumeMounts": [
            {"name": "configuration", "mountPath": str(_CONFIGURATION), "readOnly": True},
            {"name": "runs", "mountPath": str(kubernetes.volume_path)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _grace_s(config),
        "containers": [container],
        "volumes": [
            {"name": "configuration", "configMap": {"name": config_map}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": kubernetes.volume_claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shm_size}},
        ],
    }
    return merge(pod, kubernetes.pod_overrides)


def _user_variables(kubernetes: KubernetesConfig) -> Iterator[dict[str, Any]]:
    for name, value in kubernetes.env.items():
        yield {"name": name, "value": _literal(value)}
    for name, key in kubernetes.secret_env.items():
        secret, _, entry = key.partition("/")
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": entry}}}


def _literal(text: str) -> str:
    """Return what the kubelet reads as `text`: it would replace `$(NAME)`."""
    return text.replace("$", "$$")
