"""Defines the events of a run's history, each of which is a JSON object in a line of events.jsonl.

The name of an event in the file is its class name in lower case, or the `tag` of the class. `trivet check` (trivet.history) proves
that the events of a history come in the order that is described here.

Group: a `dispatch`, then exactly one of `batch` (trained in that step), `filter` and `drop`. A group whose rollouts were all scored
has a `finish` before that. If a server or a worker is lost while the group runs, the group is dispatched again under the same id:
one `dispatch` for each attempt at the group, all before its `finish`, each with the version of that attempt. A lost attempt at a
group writes no event, and none of its tokens is kept. Groups that wait or are in flight when a run stops are in the last
checkpoint. After a resume, those in flight are dispatched again under the same id.

Policy: `publish`, `load`, `retire`. The `publish` is written before any server can load the policy, and after the `train` of its
step. A `batch` is written before the batch is trained. A `commit` is written after the checkpoint became valid. If the run is
killed in between, the checkpoint exists and the event does not. For a policy with a probe, `publish` has the number of tokens that
servers must reproduce, and `load` how closely a server did. The policy that a run starts from is compared by the trainer, which
writes a `probe`.

Server: a `load`, a `serverup`, then loads of newer versions. A `serverdown` marks the server unhealthy, and its served version
becomes unknown. Before its next `serverup` it loads the version that the other servers serve then, which may be the same as before.
No group is dispatched to a server before its first `serverup`, nor between a `serverdown` and the next `serverup`.

Role: its first event is `start`. After its `stop` the next event is the `start` of the next attempt. A process that is killed
writes no `stop`. A `rollouts` event is written after the files of batch N, before batch N+1 is formed.

A `start` with `from_step` N voids events that its role wrote in earlier attempts: the trainer's events of steps and versions after
N, and the orchestrator's events after its batch N. Those steps are done again.
"""

import msgspec

from trivet.wire.versions import GroupId, PolicyVersion, Step


class Event(msgspec.Struct, kw_only=True, tag_field="event", tag=str.lower):
    """The fields of every event."""

    time: float = 0.0
    """Unix seconds. `EventWriter` sets this field, `role` and `attempt`."""
    role: str = ""
    attempt: int = 0


class Start(Event):
    """A role began an attempt."""

    run_id: str
    from_step: Step
    """0 for a fresh run; N when resumed from the checkpoint of step N."""
    replayed_run: str = ""
    """The run that sampled the rollouts which this orchestrator replays (`orchestrator.replay`); empty without a replay. In a
    replay the versions in events of groups and batches name policies of that run, and there are no servers."""


class Dispatch(Event):
    """A group was sent to a server, for the first time or again."""

    group_id: GroupId
    env: str
    example_id: int
    version: PolicyVersion
    """The server served at least this version when the attempt at the group started. While a load is under way, it may serve a
    newer one."""
    server: str = ""
    """Base URL of the server that gets the group's requests."""


class Finish(Event):
    """All rollouts of a group are scored."""

    group_id: GroupId
    reward_mean: float
    oldest_version: PolicyVersion
    newest_version: PolicyVersion
    completion_tokens: float
    """Mean number of tokens that the model sampled for a rollout of the group."""


class Filter(Event):
    """A finished group was discarded: it carries no signal."""

    group_id: GroupId
    reason: str
    """An `orchestrator.filters.FilterReason`."""


class Drop(Event):
    """A group was discarded: it failed, or became stale."""

    group_id: GroupId
    reason: str
    """`stale`, `failed: …`, or after a resume `example_gone`, `ckpt.skip_buffer` or `no_teacher_logprobs`."""


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
    manifest_sha256: str = ""
    """SHA-256 of the policy's manifest.json."""


class Load(Event):
    """A server serves a policy."""

    version: PolicyVersion
    digest: str
    server: str
    probe_mismatch: float | None = None
    """Mean difference, in nats, between the server's log-probabilities of the policy's probe and the trainer's; None: no probe."""
    probe_limit: float | None = None
    """The largest mean difference with which a server serves the policy."""
    source: str = "files"
    """Where the server got it from: `files`, or the trainer's memory by `nccl` or `gloo`."""


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
    """A server takes rollouts, again or for the first time, and serves `version`."""

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
    digest: str
    """`CommitRecord.digest`, which stands for every byte of the checkpoint."""


class Stop(Event):
    """A role ended, and was not killed."""

    step: Step
    """The last step that it finished."""
    reason: str
    """`done`, `failed` or `interrupted`; `preempted` when it was asked to commit and end; `exhausted` when a replay had no groups
    left before the last step."""


class EnvLoad(Event):
    """The workers of an environment have loaded it, before the first group of an attempt."""

    env: str
    package: str
    """Version of the environment's distribution; empty when no distribution has its name."""
    api: str
    """Generation of the verifiers API that it is written for: `v0` or `v1`."""
    verifiers: str
    """Version of the verifiers package in its workers."""
    python: str
    """Version of Python in its workers."""
    worker: str
    """Name and version of the distribution that its workers run from."""


class EnvRestart(Event):
    """A worker of an environment ended and is started again. Its groups are dispatched again, or dropped as failed."""

    env: str
    worker: str
    """Name of the worker."""
    pid: int
    """Process id of the worker that ended."""
    cause: str


class Restart(Event):
    """The launcher starts these roles again, after it ended their remaining processes. The `from_step` of their next `start` shows
    which events that voids.
    """

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
