"""Tells whether a scheduler has started this job before."""

from collections.abc import Mapping

JOB_RETRIED = "JOB_RETRIED"
"""Set by `schedulers.job` when an earlier start of the job left a note, because most schedulers do not count starts."""
_SLURM_RESTARTS = "SLURM_RESTART_COUNT"
"""How often SLURM has queued the job again; unset for a job that it never has."""


def is_restarted_job(environ: Mapping[str, str]) -> bool:
    """Return whether an earlier start of this job has left a note, or SLURM says that there was one."""
    return any(environ.get(name, "0") not in ("", "0") for name in (JOB_RETRIED, _SLURM_RESTARTS))
