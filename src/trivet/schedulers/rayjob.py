"""Describes a run over several nodes as a RayJob of KubeRay. Pure; `schedulers.kubernetes` writes it beside the ConfigMap.

The head pod runs the driver of the run and nothing else. Each pod of a worker group offers Ray what one node of the run asks for:
a pod is a node. KubeRay replaces lost pods. After any failure of the driver it makes a new cluster, at most `backoffLimit` times.

Fields: ray.io/v1 as published with KubeRay 1.7.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from trivet.config.schema.rl import RLConfig
from trivet.schedulers.documents import without_none
from trivet.schedulers.preparation import count_serving_machines

_RAY_VERSION = "2.60.0"
"""KubeRay asks for the version of the image. It tells apart features that all versions of our range have."""
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Ray's ports for Prometheus answer everybody, also with a token.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Variables of every pod: Ray reports nothing, and roles have the usual priority."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Variable of the head: seconds between the request to end that Ray sends the driver, and its kill. Ray's default is 3."""
_COMMIT_BEFORE_END = """
pid=$(cat {pid_file}) && kill -TERM "$pid" || exit 0
while kill -0 "$pid"; do sleep 1; done
"""

MakePod = Callable[[int, int | None], dict[str, Any]]
"""Makes the specification of a pod from its GPUs and its CPUs; None leaves the CPUs to the table [kubernetes]."""


def commit_before_end(pid_file: str) -> dict[str, Any]:
    """Return fields of the head's container that ask the driver to end, and wait for it, before anything else in the pod ends.

    Kubernetes signals the first process, which is Ray's: with it the roles would end before they have committed.

    Args:
        pid_file: holds the process id of the driver while it runs.
    """
    script = _COMMIT_BEFORE_END.format(pid_file=shlex.quote(pid_file))
    return {"lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", script]}}}}


def make_spec(
    config: RLConfig,
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
    groups = list(_worker_groups(config, num_gpus=num_gpus, make_pod=make_pod))
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


def _worker_groups(config: RLConfig, *, num_gpus: int, make_pod: MakePod) -> Iterator[dict[str, Any]]:
    deployment = config.deployment
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
            yield _group(name, num=num, most=most, params=params, labels=labels, pod=make_pod(num_gpus, None))
    if deployment.num_env_nodes:
        resources = {"resources": shlex.quote(json.dumps(deployment.env_resources))} if deployment.env_resources else {}
        yield _group(
            "env",
            num=deployment.num_env_nodes,
            most=deployment.max_env_nodes or deployment.num_env_nodes,
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
