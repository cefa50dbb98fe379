"""Describes a run over several nodes as a RayJob of KubeRay. Pure; `schedulers.kubernetes` writes it beside the ConfigMap.

The head pod runs the driver of the run and nothing else. Each pod of a worker group offers Ray what one node of the run asks for:
a pod is a node. KubeRay replaces lost pods. After any failure of the driver it makes a new cluster, at most `backoffLimit` times.

Fields: ray.io/v1 as published with KubeRay 1.7.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from trivet.config.schema.deployment import DeploymentConfig
from trivet.schedulers.documents import without_none

_RAY_VERSION = "2.60.0"
"""KubeRay asks for the version of the image. It tells apart features that all versions of our range have."""
_ROLE_CPUS = 1
"""CPUs that Ray may give away in a pod with GPUs: exactly what one training or serving node asks for (`cluster.bundles`)."""
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Variables of every pod: Ray reports nothing, and roles have the usual priority."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Variable of the head: seconds between the request to end that Ray sends the driver, and its kill. Ray's default is 3."""

MakePod = Callable[[int, int | None], dict[str, Any]]
"""Makes the specification of a pod from its GPUs and its CPUs; None leaves the CPUs to the table [kubernetes]."""


def make_spec(
    deployment: DeploymentConfig,
    *,
    entrypoint: list[str],
    max_restarts: int,
    num_gpus: int,
    make_pod: MakePod,
    head: dict[str, Any],
) -> dict[str, Any]:
    """Return the specification of a RayJob.

    Args:
        entrypoint: the words of the driver's command.
        num_gpus: GPUs of each pod that trains or serves.
        head: specification of the head's pod.
    """
    groups = list(_worker_groups(deployment, num_gpus=num_gpus, make_pod=make_pod))
    is_elastic = any(group["maxReplicas"] > group["replicas"] for group in groups)
    cluster = {
        "rayVersion": _RAY_VERSION,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True if is_elastic else None,
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": {"spec": head}},
        "workerGroupSpecs": groups,
    }
    return {
        "entrypoint": shlex.join(entrypoint),
        "submissionMode": "K8sJobMode",
        "backoffLimit": max_restarts,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": without_none(cluster),
    }


def _worker_groups(deployment: DeploymentConfig, *, num_gpus: int, make_pod: MakePod) -> Iterator[dict[str, Any]]:
    # Without GPUs nothing keeps the nodes that train off the pods for environments, so all pods are alike and any may be any node.
    env_cpus = deployment.env_cpus_per_node if deployment.num_env_nodes else _ROLE_CPUS
    params = {"num-cpus": str(_ROLE_CPUS if num_gpus else env_cpus), "num-gpus": str(num_gpus)}
    num_train, span = deployment.num_train_nodes, deployment.num_infer_nodes
    labels = dict(deployment.ray.labels) if num_gpus and deployment.ray.labels else None
    counts = {
        "train": (num_train, num_train),
        "infer": (span * deployment.num_infer_replicas, span * deployment.num_servers),
    }
    for name, (num, most) in counts.items():
        if num:
            yield _group(name, num=num, most=most, params=params, labels=labels, pod=make_pod(num_gpus, None))
    if deployment.num_env_nodes:
        resources = {"resources": shlex.quote(json.dumps(deployment.env_resources))} if deployment.env_resources else {}
        num = deployment.num_env_nodes
        yield _group(
            "env",
            num=num,
            most=deployment.max_env_nodes or num,
            params={"num-cpus": str(env_cpus), "num-gpus": "0", **resources},
            labels=None,
            pod=make_pod(0, env_cpus),
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
