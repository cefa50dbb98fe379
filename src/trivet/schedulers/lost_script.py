"""Has a job of SLURM queued again, or cancelled, when the node that runs its batch script was lost.

A job of several nodes is submitted with --no-kill, so SLURM takes a lost node out of the job and lets the others go on. The batch
script queues the job again when the run needs it. If the script's own node is lost, so is the script, and nothing else would free
the other nodes before the time limit. `cluster.bring_up` calls this on a few other nodes, after they have missed the first one.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from trivet.shown_text import shorten

MAX_WATCHERS = 3
"""Number of nodes after the first that watch. One is too few, because it may be lost too. All nodes of a large job would overload
the controller."""
_NOTICE_TIMEOUT_S = 900.0
"""Seconds that SLURM may take to notice a lost node: SlurmdTimeout, 300 s by default, and a controller that is busy."""
_ASK_INTERVAL_S = 15.0
"""Seconds between two calls of squeue."""
_COMMAND_TIMEOUT_S = 60.0
"""A command of SLURM waits several times its MessageTimeout, 10 s by default, for a controller that does not answer."""


def replace_lost_script(
    job_id: str,
    *,
    host: str,
    action: str,
    is_over: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait for SLURM to take `host` out of the job, then do what the batch script would do; return whether that was done.

    Args:
        host: SLURM's name of the node that runs the batch script.
        action: the command that is given the job's number: `scontrol requeue`, or `scancel` for a job that is never queued again.
        is_over: returns whether the first node has noted its exit code: then it lives, and the script acts by itself.
    """
    deadline = clock() + _NOTICE_TIMEOUT_S
    while not is_over() and clock() < deadline:
        if _run(["squeue", "--noheader", f"--jobs={job_id}", f"--nodelist={host}", "--format=%i"]) == "":
            print(f"SLURM took {host} out of job {job_id}, and the batch script with it: {action} here", file=sys.stderr)
            return _run([*action.split(), job_id]) is not None
        sleep(_ASK_INTERVAL_S)
    return False


def _run(command: Sequence[str]) -> str | None:
    """Return the output of a command; None when it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
        reason = done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as exc:
        reason = str(exc)
    print(f"{command[0]} failed: {shorten(reason)}", file=sys.stderr)
    return None
