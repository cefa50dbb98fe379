"""Names the variables by which a scheduler tells a node its place among those of a job."""

from collections.abc import Mapping

NODE_BASE, JOB_INDEX = "JOBSET_NODE_BASE", "JOBSET_JOB_INDEX"
"""The first node of a replicated job, and the number of the job among its replicas; `schedulers.kubernetes` sets them."""
POD_INDEX = "JOB_COMPLETION_INDEX"
"""The number of the pod in its job; Kubernetes sets it."""
JOB_SIZE, JOB_HEAD, JOB_NODES = "JOBSET_JOB_SIZE", "JOBSET_HEAD", "JOBSET_NODES"
"""Pods of each of these jobs, the host name of the first node, and the number of all nodes."""
SET_ID, RESTARTS = "JOBSET_UID", "JOBSET_RESTARTS"
"""The id of the JobSet, which no other one has, and how often all of its pods were recreated."""

SLURM_INDEX, SLURM_RESTARTS, SLURM_JOB = "SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID"
"""The number of a task of SLURM, how often its job was queued again (unset for a job that never was), and the job's number."""
SKYPILOT_INDEX, SKYPILOT_HOSTS = "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"
"""The number of a node of SkyPilot, and the addresses of all, one on each line."""


def is_restarted_job(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler says that it has started this job before. SkyPilot does not say it."""
    return any(environ.get(name, "0") not in ("", "0") for name in (RESTARTS, SLURM_RESTARTS))
