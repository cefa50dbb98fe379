"""Defines the state that a run shows while it runs: its processes' reports, and the status.json that the launcher makes of them.

Times are Unix seconds and are only shown to people. Whether a process is stuck is decided by whether its report changes, not by the
times in it.
"""

from enum import StrEnum

import msgspec

from trivet.wire.versions import PolicyVersion, Step

RUNNING_GROUPS = "running groups"
"""The activity that the environment workers of another node report once they have loaded their environments."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one environment worker, as the pool that started it reports it."""

    env: str
    """The environment's name in the configuration."""
    pid: int
    is_alive: bool = True
    num_pending: int = 0
    """Groups that it was given and has not answered."""
    num_generating: int = 0
    """Rollouts that wait for the model."""
    num_scoring: int = 0
    """Rollouts that run the environment's own code: tools or rewards."""
    scoring_for_s: float = 0.0
    """Seconds for which the oldest of these rollouts has run that code."""
    blocked_for_s: float = 0.0
    """Seconds for which the worker's event loop has not answered."""
    num_restarts: int = 0


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process's report about itself, written about once a second."""

    role: str
    rank: int = 0
    num_ranks: int = 1
    pid: int
    attempt: int = 1
    time: float
    activity: str = ""
    """The activity ("training step 12"). When `waits_for` is set: the thing that the process waits for ("batch 12")."""
    waits_for: str = ""
    """The role for which the process waits; empty while it does not wait."""
    since: float
    """The time when the activity began."""
    step: Step = Step(0)
    """The last step that it finished."""
    policy_version: PolicyVersion | None = None
    """Version that the servers serve; None for every role but the orchestrator, like the two fields that follow."""
    num_ready: int | None = None
    """Finished groups that wait for a batch."""
    num_in_flight: int | None = None
    """Groups that are dispatched and have not ended."""
    workers: list[WorkerStatus] = []
    """The environment workers that the process started."""


class RoleState(StrEnum):
    """The states of a role."""

    RUNNING = "running"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    """The role has ended and waits for its restart."""
    ENDED = "ended"


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a role, as its launcher reports it."""

    name: str
    state: RoleState
    pid: int
    node: int = 0
    """The index of the node on which it runs; 0 is the launcher's own."""
    exit: str = ""
    """The way in which it ended, such as `killed by SIGKILL`; empty while it runs."""
    stuck: str = ""
    """The watchdog's reason to call it stuck; empty while it is not."""
    reports: list[ProcessReport] = []
    """One report, or one for each rank of the trainer. Reports that could not be read are missing."""


class RestartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of roles by the launcher."""

    time: float
    roles: list[str]
    cause: str
    """The cause of the failure, such as `trainer killed by SIGKILL`."""
    from_step: Step | None = None
    """The step that trainer and orchestrator went back to, 0 for the start; None when inference alone was restarted."""
    lost_steps: int = 0
    """Number of finished steps that are trained again."""
    down_s: float | None = None
    """Seconds from the failure to the next finished step, or until every server of the unit answers; None until then."""


class RunState(StrEnum):
    """The states of a run, while it runs and after its end."""

    RUNNING = "running"
    PREEMPTED = "preempted"
    """A signal asked the run to end: the roles commit and stop."""
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of status.json."""

    run_id: str
    attempt: int
    pid: int
    """Process id of the launcher."""
    node: str = ""
    """Host name of the launcher's machine, to which `pid` and the times belong; empty for roles that were started by hand."""
    state: RunState
    started: float
    """The time when this launcher started."""
    time: float
    """The time when this status was written."""
    max_steps: int | None = None
    last_commit: Step | None = None
    roles: list[RoleStatus] = []
    restarts: list[RestartRecord] = []
    last_error: str = ""
    exit_code: int | None = None
    reason: str = ""
    """The reason why the run ended; empty while it runs."""
    events_bytes: int = 0
    """Length in bytes of the complete lines of events.jsonl when this was written. A file that is shorter now has lost events."""
