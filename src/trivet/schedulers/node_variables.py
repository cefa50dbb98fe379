"""Names the variables by which a scheduler tells a node its place among those of a job, and reads them."""

from collections.abc import Mapping

from trivet.errors import ConfigError, NodesMissing

NODE_BASE, JOB_INDEX = "JOBSET_NODE_BASE", "JOBSET_JOB_INDEX"
"""The first node of a replicated job, and the number of the job among its replicas; `schedulers.kubernetes` sets them."""
POD_INDEX = "JOB_COMPLETION_INDEX"
"""The number of the pod in its job; Kubernetes sets it."""
JOB_SIZE, JOB_HEAD, JOB_NODES = "JOBSET_JOB_SIZE", "JOBSET_HEAD", "JOBSET_NODES"
"""Pods of each of these jobs, the host name of the first node, and the number of all nodes."""
SET_ID, RESTARTS = "JOBSET_UID", "JOBSET_RESTARTS"
"""The id of the JobSet, which no other one has, and how often all of its pods were recreated."""

JOB_RETRIED = "JOB_RETRIED"
"""Set by `schedulers.job` when an earlier start of the job left a note, because Job, RayJob and SkyPilot do not count starts."""
SLURM_INDEX, SLURM_RESTARTS, SLURM_JOB = "SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID"
"""The number of a task of SLURM, how often its job was queued again (unset for a job that never was), and the job's number."""
SKYPILOT_INDEX, SKYPILOT_HOSTS = "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"
"""The number of a node of SkyPilot, and the addresses of all, one on each line."""


def is_restarted_job(environ: Mapping[str, str]) -> bool:
    """Return whether the scheduler says that it has started this job before, or an earlier start has left a note."""
    return any(environ.get(name, "0") not in ("", "0") for name in (RESTARTS, SLURM_RESTARTS, JOB_RETRIED))


def pod_exit_code(exit_code: int, environ: Mapping[str, str]) -> int:
    """Return the exit code of a pod whose command has ended with `exit_code`.

    The first pod decides what is final for the run, and it has read the configuration before the others. So when another pod
    refuses to start, its own node is the reason (missing GPUs, a full disk), and a start on another node may succeed. A node that
    is no pod keeps the code.
    """
    is_first = all(environ.get(name, "0") == "0" for name in (NODE_BASE, JOB_INDEX, POD_INDEX))
    if exit_code == ConfigError.exit_code and NODE_BASE in environ and not is_first:
        return NodesMissing.exit_code
    return exit_code
