"""Defines what a run says about itself while it runs: its processes' reports, and the status.json that the launcher makes of them.

Times are Unix seconds. They are for words alone: who is stuck is judged by whether a report changes, not by its clock.
"""

from enum import StrEnum

import msgspec

from trivet.wire.versions import PolicyVersion, Step

RUNNING_GROUPS = "running groups"
"""The activity of the environment workers of another node once they have loaded."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One environment worker, as the pool that started it sees it."""

    env: str
    """The environment's name in the configuration."""
    pid: int
    is_alive: bool = True
    num_pending: int = 0
    """Groups it was given and has not answered."""
    num_generating: int = 0
    """Rollouts that wait for the model."""
    num_scoring: int = 0
    """Rollouts in the environment's own code: tools, rewards."""
    scoring_for_s: float = 0.0
    """Age of the oldest of these."""
    blocked_for_s: float = 0.0
    """Seconds for which its event loop has not answered."""
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
    """The activity ("training step 12"), or the thing waited for ("batch 12") when `waits_for` is set."""
    waits_for: str = ""
    """The role that it waits for."""
    since: float
    """When the activity began."""
    step: Step = Step(0)
    """The last step that it finished."""
    policy_version: PolicyVersion | None = None
    """Version that the servers serve (orchestrator)."""
    num_ready: int | None = None
    """Groups that wait for a batch (orchestrator)."""
    num_in_flight: int | None = None
    workers: list[WorkerStatus] = []


class RoleState(StrEnum):
    """States where a role is in its life."""

    RUNNING = "running"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    """It ended and is started again in a moment."""
    ENDED = "ended"


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A role as its launcher sees it."""

    name: str
    state: RoleState
    pid: int
    node: int = 0
    """The index of the node on which it runs; 0 is the launcher's own."""
    exit: str = ""
    """The way it ended: `killed by SIGKILL`."""
    stuck: str = ""
    """The watchdog's reason to call it stuck; empty while it is not."""
    reports: list[ProcessReport] = []
    """One, or one for each rank."""


class RestartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of roles by the launcher."""

    time: float
    roles: list[str]
    cause: str
    """`trainer killed by SIGKILL`."""
    from_step: Step | None = None
    """The step that trainer and orchestrator went back to, 0 for the start; None when inference alone was restarted."""
    lost_steps: int = 0
    """Finished steps that are taken again."""
    down_s: float | None = None
    """Seconds from the failure to the next finished step, or to a server that answers; None until then."""


class RunState(StrEnum):
    """States how the run goes, or how it ended."""

    RUNNING = "running"
    PREEMPTED = "preempted"
    """SIGTERM came: the roles commit and stop."""
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of status.json."""

    run_id: str
    attempt: int
    pid: int
    """The launcher's."""
    node: str = ""
    """Host name of the launcher's machine, on which `pid` and the times are its own; empty for roles that were started by hand."""
    state: RunState
    started: float
    """When this launcher started."""
    time: float
    """When this was written."""
    max_steps: int | None = None
    last_commit: Step | None = None
    roles: list[RoleStatus] = []
    restarts: list[RestartRecord] = []
    last_error: str = ""
    exit_code: int | None = None
    reason: str = ""
    """The reason why it ended."""
    events_bytes: int = 0
    """Length of the complete lines of events.jsonl when this was written: a shorter file lost some."""
