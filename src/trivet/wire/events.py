"""The run's history, one JSON object per line of events.jsonl.

Life of a group: dispatch, then exactly one of batch (trained in that step), filter, drop; a group that was completed has a
finish before that. A group whose try was lost without a result (its server went down, its worker died) is dispatched again,
under the same id, while it is still in flight: one `dispatch` per try, all of them before its finish, each with the version
of that try. A lost try itself writes nothing, and no token of it is kept. The last checkpoint owns the groups that wait or are
in flight when a run stops: after a resume those in flight are dispatched again, under the same id.
Life of a policy: publish, load, retire. Its publish is written before anybody can load it, and after the train of its step; a
batch is written before it is trained. A commit is written after it became valid, so that of a run that was killed in between
the checkpoint is there and the event is not. `trivet check` (trivet.history) proves that a history is of this form.
A policy with a probe carries how many tokens servers must reproduce (`publish`) and how closely one did (`load`). For the policy
that a run starts from the trainer compares, and writes a `probe`.
Life of a server: load, `serverup`, then loads of newer versions. `serverdown` marks it unhealthy, and the version that it served
is forgotten: before its next `serverup` comes a load of the version that the other servers serve then, which it may have served
before. No group is dispatched to a server before its first `serverup`, nor between a `serverdown` and the next `serverup`.
The first event of a role is its `start`; after its `stop` comes nothing but the `start` of the next attempt. A process that is
killed writes no `stop`.
A `rollouts` event is written after the files of batch N, before batch N+1 is formed.
A `start` with `from_step` N voids, of what its role wrote in earlier attempts: the trainer's events of steps and versions
after N, and the orchestrator's events behind its batch N. Those steps happen again.
"""

import msgspec

from trivet.wire.versions import GroupId, PolicyVersion, Step


class Event(msgspec.Struct, kw_only=True, tag_field="event", tag=str.lower):
    """The fields of every event."""

    time: float = 0.0
    """Unix seconds; set by the writer, like role and attempt."""
    role: str = ""
    attempt: int = 0


class Start(Event):
    """A role began an attempt."""

    run_id: str
    from_step: Step
    """0 for a fresh run; N when resumed from the checkpoint of step N."""
    replayed_run: str = ""
    """The run that sampled the rollouts which this orchestrator replays (`orchestrator.replay`). The versions in its events of
    groups and batches are of policies of that run, and no server is asked."""


class Dispatch(Event):
    """A group was sent to a server, for the first time or again."""

    group_id: GroupId
    env: str
    example_id: int
    version: PolicyVersion
    """The server served at least this version when the try started. While a load is under way, some serve a newer one."""
    server: str = ""
    """Base URL of the server that its requests go to."""


class Finish(Event):
    """All rollouts of a group are scored."""

    group_id: GroupId
    reward_mean: float
    oldest_version: PolicyVersion
    newest_version: PolicyVersion


class Filter(Event):
    """A finished group was discarded: it carries no signal."""

    group_id: GroupId
    reason: str
    """A `algorithms.filters.FilterReason`."""


class Drop(Event):
    """A group was discarded: it failed, or became stale."""

    group_id: GroupId
    reason: str
    """`stale`, or `failed: …`."""


class BatchFormed(Event, tag="batch"):
    """The groups of a batch were chosen."""

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
    """The trainer finished an optimizer step."""

    step: Step
    group_ids: list[GroupId]


class Publish(Event):
    """A policy is about to become readable."""

    version: PolicyVersion
    digest: str
    num_probe_tokens: int = 0
    """Tokens whose log-probabilities each server must reproduce before it serves the policy; 0: nothing is compared."""


class Load(Event):
    """A server serves a policy."""

    version: PolicyVersion
    digest: str
    server: str
    probe_mismatch: float | None = None
    """Mean difference, in nats, between the server's log-probabilities of the policy's probe and the trainer's; None: no probe."""
    probe_limit: float | None = None
    """The largest mean difference with which a server serves the policy."""


class ProbeCompared(Event, tag="probe"):
    """The trainer compared the policy that a run starts from with what every server computed for the tokens of its probe."""

    version: PolicyVersion
    mismatch: float
    """Mean difference of the log-probabilities, in nats, of the server that differs most."""
    limit: float
    num_servers: int


class ServerDown(Event):
    """A server was marked unhealthy: it failed, reported another policy, or left the list."""

    server: str
    reason: str


class ServerUp(Event):
    """A server takes rollouts again, or for the first time, holding `version`."""

    server: str
    version: PolicyVersion
    digest: str


class Retire(Event):
    """A published policy was removed."""

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
    """A checkpoint became valid."""

    step: Step
    digest: str = ""
    """`CommitRecord.digest`, which stands for every byte of the checkpoint; empty in histories of older versions."""


class Stop(Event):
    """A role ended in order."""

    step: Step
    reason: str
    """`done`, `failed`, `interrupted`; `preempted`: it was asked to commit and to end; `exhausted`: a replay used up its record
    before the last step."""


class EnvLoad(Event):
    """The workers of an environment have loaded it, before the first group of an attempt."""

    env: str
    package: str
    """Version of the environment's distribution; empty when none has its name."""
    api: str
    """Generation of the verifiers API that it is written for: `v0` or `v1`."""
    verifiers: str
    python: str
    worker: str
    """Name and version of the distribution that its workers run from."""


class EnvRestart(Event):
    """A worker of an environment ended and is started again. The groups it ran are dispatched again, or dropped as failed."""

    env: str
    worker: str
    pid: int
    """Process id of the worker that ended."""
    cause: str


class Restart(Event):
    """The launcher ended what was left of these roles and starts them again. Their next `start` tells what that voids."""

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
    | ProbeCompared
    | ServerDown
    | ServerUp
    | Retire
    | Evaluate
    | Commit
    | Stop
    | EnvLoad
    | EnvRestart
    | Restart
)
