"""The run's history, one JSON object per line of events.jsonl.

Life of a group: dispatch, then exactly one of batch (trained in that step), filter, drop; a group that was completed has a
finish before that. A group whose try was lost without a result (its server went down, its worker died) is dispatched again,
under the same id, while it is still in flight: one `dispatch` per try, all of them before its finish, each with the version
of that try. A lost try itself writes nothing, and no token of it is kept. The last checkpoint owns the groups that wait or are
in flight when a run stops: after a resume those in flight are dispatched again, under the same id.
Life of a policy: publish, load, retire. Its publish is written before anybody can load it, and after the train of its step; a
batch is written before it is trained. A commit is written after it became valid, so that of a run that was killed in between
the checkpoint is there and the event is not. `trivet check` (trivet.history) proves that a history is of this form.
Life of a server: load, `serverup`, then loads of newer versions. `serverdown` sets it aside, and whatever it held is forgotten:
before its next `serverup` comes a load of what the other servers hold then, which it may have held before. No group is
dispatched to a server before its first `serverup`, nor between a `serverdown` and the next `serverup`.
The first event of a role is its `start`; after its `stop` comes nothing but the `start` of the next attempt. A process that is
killed writes no `stop`.
A `rollouts` event is written after the files of batch N, before batch N+1 is formed.
A `start` with `from_step` N voids, of what its role wrote in earlier attempts: the trainer's events of steps and versions
after N, and the orchestrator's events behind its batch N. Those steps happen again.
"""

import msgspec

from trivet.wire.rollouts import GroupId
from trivet.wire.versions import PolicyVersion, Step


class Event(msgspec.Struct, kw_only=True, tag_field="event", tag=str.lower):
    time: float = 0.0
    """Unix seconds; set by the writer, like role and attempt."""
    role: str = ""
    attempt: int = 0


class Start(Event):
    run_id: str
    from_step: Step
    """0 for a fresh run; N when resumed from the checkpoint of step N."""


class Dispatch(Event):
    group_id: GroupId
    env: str
    example_id: int
    version: PolicyVersion
    """What the server held at least when this try started: while a load is under way some servers hold a newer one already."""
    server: str = ""
    """Base URL of the server that its requests go to."""


class Finish(Event):
    group_id: GroupId
    reward_mean: float
    oldest_version: PolicyVersion
    newest_version: PolicyVersion


class Filter(Event):
    group_id: GroupId
    reason: str
    """A `algorithms.filters.FilterReason`."""


class Drop(Event):
    group_id: GroupId
    reason: str
    """`stale`, or `failed: …`."""


class BatchFormed(Event, tag="batch"):
    step: Step
    group_ids: list[GroupId]
    oldest_version: PolicyVersion
    newest_version: PolicyVersion


class RolloutsWritten(Event, tag="rollouts"):
    """The files in rollouts/step_N/ are complete."""

    step: Step
    num_rollouts: int
    digest: str
    """SHA-256 over the names, sizes and digests of the files."""


class Train(Event):
    step: Step
    group_ids: list[GroupId]


class Publish(Event):
    version: PolicyVersion
    digest: str


class Load(Event):
    version: PolicyVersion
    digest: str
    server: str


class ServerDown(Event):
    """A server is set aside: it failed, reported another policy, or left the list."""

    server: str
    reason: str


class ServerUp(Event):
    """A server takes rollouts again, or for the first time, holding `version`."""

    server: str
    version: PolicyVersion
    digest: str


class Retire(Event):
    version: PolicyVersion


class Evaluate(Event):
    """An evaluation during the run ended. Its rollouts are not groups of the history."""

    version: PolicyVersion
    env: str
    digest: str
    avg: float | None
    """Mean reward; None when every example failed."""
    num_failed: int
    """Examples without a score."""


class Commit(Event):
    step: Step
    digest: str = ""
    """`CommitRecord.digest`, which stands for every byte of the checkpoint; empty in histories of older versions."""


class Stop(Event):
    step: Step
    reason: str
    """`done`, `failed`, `interrupted`, or `preempted`: it was asked to commit and to end."""


class EnvRestart(Event):
    """A worker of an environment ended and is started again. The groups it ran are dispatched again, or dropped as failed."""

    env: str
    worker: str
    pid: int
    """Of the one that ended."""
    cause: str


class Restart(Event):
    """The launcher ended what was left of these roles and starts them again. What that voids is told by their next `start`."""

    roles: list[str]
    cause: str
    from_step: Step | None
    """The checkpoint that trainer and orchestrator go back to, 0 for the start; None when inference alone is restarted."""


AnyEvent = (
    Start
    | Dispatch
    | Finish
    | Filter
    | Drop
    | BatchFormed
    | RolloutsWritten
    | Train
    | Publish
    | Load
    | ServerDown
    | ServerUp
    | Retire
    | Evaluate
    | Commit
    | Stop
    | EnvRestart
    | Restart
)
