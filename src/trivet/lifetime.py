"""Ties a process to its parent, so that no violent end leaves one behind (design invariant 7).

Called first thing by every process that another of ours starts: roles, trainer ranks, engine workers, environment workers.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `signal_number` when its parent ends. Linux only; elsewhere it does nothing.

    A parent that ended before the call is noticed: the process then ends itself at once.
    """
    parent = os.getppid()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        prctl = libc.prctl
    except (OSError, AttributeError):
        return
    if prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)
