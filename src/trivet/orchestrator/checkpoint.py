"""The orchestrator's part of a checkpoint: everything that would otherwise be lost (design invariant 3).

It is written before batch N is sent, as of the moment batch N was formed, so the trainer can commit step N as soon as its own
part is on disk.
"""

import msgspec

from trivet.checkpoints.parts import begin_part, finish_part
from trivet.checkpoints.settings import write_settings
from trivet.config.layout import RunLayout
from trivet.config.sections.orchestrator import OrchestratorConfig
from trivet.errors import CheckpointError, MessageRefused
from trivet.faults import reach
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.sampler import SamplerState
from trivet.wire.codec import decode, encode
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import Step

PART = "orchestrator"
_STATE_FILE = "state.msgpack"
SCHEMA = 2
"""Raised whenever `OrchestratorPart`, or a struct in it, changes in a way that an older reader would misread."""


class RunTotals(msgspec.Struct, kw_only=True):
    """Totals over the run."""

    step: Step = Step(0)
    """The last batch formed."""
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0


class OrchestratorPart(msgspec.Struct, kw_only=True):
    """The content of `state.msgpack`: the totals, the sampler and the groups at the moment a batch was formed."""

    schema: int = SCHEMA
    progress: RunTotals
    sampler: SamplerState
    buffer: BufferState
    rollouts_per_example: int

    @property
    def next_group_id(self) -> GroupId:
        """The first id that no group has."""
        return self.sampler.next_group_id


class _SchemaOnly(msgspec.Struct):
    schema: int = 1
    """The first schema did not say so."""


def write_part(layout: RunLayout, part: OrchestratorPart, *, config: OrchestratorConfig) -> None:
    """Returns once the part is on disk, with the configuration that made it."""
    step = part.progress.step
    reach("orchestrator_half.before", step=step)
    directory = begin_part(layout, step, PART)
    write_settings(directory, config)
    (directory / _STATE_FILE).write_bytes(encode(part))
    reach("orchestrator_half.during", step=step, path=directory)
    finish_part(layout, step, PART)
    reach("orchestrator_half.after", step=step)


class OwedGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that a part holds: what the history checker compares with events.jsonl."""

    next_group_id: GroupId
    ready: list[GroupId]
    in_flight: list[GroupId]


def read_owed(layout: RunLayout, step: Step) -> OwedGroups:
    """
    Raises:
        CheckpointError: the part is missing, unreadable or of another schema.
    """
    part = _read(layout, step)
    return OwedGroups(
        next_group_id=part.next_group_id,
        ready=[group.group_id for group in part.buffer.ready],
        in_flight=part.buffer.in_flight_ids,
    )


def read_part(layout: RunLayout, step: Step, *, rollouts_per_example: int) -> OrchestratorPart:
    """Return the orchestrator's part of checkpoint `step`.

    Raises:
        CheckpointError: missing, unreadable, of another schema, or made with another group size, which the groups that wait in
            it have.
    """
    part = _read(layout, step)
    if part.rollouts_per_example != rollouts_per_example:
        raise CheckpointError(
            f"orchestrator.rollouts_per_example was {part.rollouts_per_example} when checkpoint step_{step} was made and is "
            f"{rollouts_per_example} now; the groups that wait in it have that size: set it back, or start a new run "
            f"from {layout.weights_step(step)}"
        )
    return part


def _read(layout: RunLayout, step: Step) -> OrchestratorPart:
    path = layout.checkpoint_step(step) / PART / _STATE_FILE
    try:
        data = path.read_bytes()
        schema = decode(data, _SchemaOnly).schema
        if schema == SCHEMA:
            return decode(data, OrchestratorPart)
    except (OSError, MessageRefused) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}; resume from another checkpoint") from exc
    raise CheckpointError(
        f"{path} has schema {schema}, this version reads schema {SCHEMA}; resume with the version that wrote it, or start a "
        f"new run from {layout.weights_step(step)}"
    )
