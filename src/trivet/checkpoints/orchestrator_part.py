"""Reads the state in the orchestrator's part of a checkpoint.

Called by the orchestrator, which resumes from the whole state, and by `trivet check`, which compares the groups in it with the
history. The private structs have only those fields of the state that this module reads: decoding skips all others.
"""

import msgspec

from trivet.checkpoints.commit import ORCHESTRATOR
from trivet.config.layout import RunLayout
from trivet.errors import CheckpointError, MessageRefused
from trivet.wire.codec import StructT, decode
from trivet.wire.versions import GroupId, Step

STATE_FILE = "state.msgpack"
SCHEMA = 3
"""Raised whenever the state, or a struct in it, changes in a way that an older reader would misread."""


class PendingGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of the groups without an outcome when a batch was formed. The checkpoint of that step holds these groups."""

    next_group_id: int
    """The first id that no group has."""
    ready: frozenset[int]
    """Finished groups that wait for a batch."""
    in_flight: frozenset[int]


class _SchemaOnly(msgspec.Struct):
    schema: int


class _GroupOnly(msgspec.Struct):
    group_id: GroupId


class _Buffer(msgspec.Struct):
    ready: list[_GroupOnly] = []
    in_flight: list[_GroupOnly] = []


class _Sampler(msgspec.Struct):
    next_group_id: GroupId = GroupId(0)


class _GroupsOnly(msgspec.Struct):
    sampler: _Sampler
    buffer: _Buffer


def read_state(layout: RunLayout, step: Step, kind: type[StructT]) -> StructT:
    """Read the state of a committed step as a struct of type `kind`; other fields of the state are skipped."""
    path = layout.checkpoint_step(step) / ORCHESTRATOR / STATE_FILE
    try:
        data = path.read_bytes()
        schema = decode(data, _SchemaOnly).schema
        if schema == SCHEMA:
            return decode(data, kind)
    except (OSError, MessageRefused) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}; resume from another checkpoint") from exc
    raise CheckpointError(
        f"{path} has schema {schema}, this version reads schema {SCHEMA}; resume with the version that wrote it, or start a "
        f"new run from {layout.weights_step(step)}"
    )


def read_pending_groups(layout: RunLayout, step: Step) -> PendingGroups:
    """Return the ids of the groups that the checkpoint of `step` holds."""
    state = read_state(layout, step, _GroupsOnly)
    return PendingGroups(
        next_group_id=state.sampler.next_group_id,
        ready=frozenset(group.group_id for group in state.buffer.ready),
        in_flight=frozenset(group.group_id for group in state.buffer.in_flight),
    )
