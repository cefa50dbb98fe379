"""The run's history, one JSON object per line of events.jsonl.

Life of a group: dispatch, then exactly one of batch (trained in that step), filter, drop; a group that was completed has a
finish before that. The last checkpoint owns the groups that wait or are in flight when a run stops: after a resume those in
flight are dispatched again, under the same id. Life of a policy: publish, load, retire.
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
    """What the server held when the group started."""


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


class Retire(Event):
    version: PolicyVersion


class Commit(Event):
    step: Step


class Stop(Event):
    step: Step
    reason: str


AnyEvent = Start | Dispatch | Finish | Filter | Drop | BatchFormed | Train | Publish | Load | Retire | Commit | Stop
