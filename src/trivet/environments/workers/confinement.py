"""Limits what a worker process may take of the machine, from inside, before any code of an environment runs.

Memory is watched from outside, by the pool (`workers.memory`): the limits that the kernel has for one process count address space,
of which libraries reserve many times what they use.
"""

import contextlib
import resource
from pathlib import Path

_MAX_OPEN_FILES = 16_384
"""Open files of a worker and of each process that it starts. A rollout in flight has a connection or two; a leak of one per group
reaches this within a day, and then costs the worker its groups and not the machine its file table."""
_OOM_SCORE = "500"
"""Added to the badness of the process, from 0 to 1000: when the machine runs out of memory the kernel ends a worker, which is
restarted, and not the trainer."""


def confine() -> None:
    """Limit the open files of this process and of what it starts, and offer it to the kernel first when memory runs out."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError):  # a container may forbid it, and the machine then chooses by itself
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
