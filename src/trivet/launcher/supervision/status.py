"""Writes status.json: who waits for whom, since when, and how the run ended."""

import msgspec

from trivet.config.layout import RunLayout
from trivet.durable import replace_file
from trivet.exits import describe_exit
from trivet.launcher.logs import RunLog
from trivet.launcher.supervision.recovery import Phase
from trivet.launcher.supervision.role_processes import RoleProcess
from trivet.wire.status import RoleState, RoleStatus, RunStatus

_STATES = {Phase.STOPPING: RoleState.STOPPING, Phase.BACKING_OFF: RoleState.BACKING_OFF}


class StatusFile:
    """
    >>> file = StatusFile(layout, log=log)
    >>> file.write(status)
    """

    def __init__(self, layout: RunLayout, *, log: RunLog) -> None:
        self._layout = layout
        self._log = log
        self._has_failed = False

    def write(self, status: RunStatus) -> None:
        """A run does not end because its status cannot be written; it says so once."""
        try:
            replace_file(self._layout.status, msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n")
        except OSError as exc:
            if not self._has_failed:
                self._log.say(f"{self._layout.status} cannot be written ({exc.strerror}); the run goes on")
            self._has_failed = True
        else:
            self._has_failed = False


def role_status(role_process: RoleProcess, *, phase: Phase) -> RoleStatus:
    code = role_process.child.exit_code
    state = RoleState.ENDED if code is not None else RoleState.RUNNING
    return RoleStatus(
        name=role_process.name,
        state=_STATES.get(phase, state),
        pid=role_process.child.pid,
        exit=describe_exit(code) if code is not None else "",
        stuck=role_process.stuck,
        reports=list(role_process.reports.said),
    )
