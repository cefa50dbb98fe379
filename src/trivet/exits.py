"""Describes how a process ended and what a restart cost, for errors, logs and the tools that read status.json. Pure."""

import signal

from trivet.wire.status import RestartRecord

NODE_LOST = 1000
"""The exit code that stands for a process that was lost with its node. No process ends with it: exit codes end at 255."""


def describe_exit(code: int | None) -> str:
    """Return `ended with exit code 3`, `killed by SIGKILL` or the like. A shell's code 128 + N is shown with the signal's name.

    Args:
        code: as in `subprocess`: -N if signal N ended the process, None while the process runs.
    """
    if code is None:
        return "still running"
    if code == NODE_LOST:
        return "lost with its node"
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with exit code {code}"
    return f"killed by {name}" if code < 0 else f"ended with exit code {code} ({name})"


def describe_restart(record: RestartRecord) -> str:
    """Return `trainer killed by SIGKILL: orchestrator and trainer restarted from step 6 (3 steps again), back after 14 s`."""
    action = f"{' and '.join(record.roles)} restarted"
    if record.from_step is not None:
        action += f" from {f'step {record.from_step}' if record.from_step else 'the start'}"
    if record.lost_steps:
        action += f" ({record.lost_steps} {'step' if record.lost_steps == 1 else 'steps'} again)"
    outcome = f"back after {record.down_s:.0f} s" if record.down_s is not None else "no progress since"
    return f"{record.cause}: {action}, {outcome}"
