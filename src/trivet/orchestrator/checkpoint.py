"""The orchestrator's half of a checkpoint: everything that would otherwise be lost (design invariant 3).

It is written before batch N is sent, as of the moment batch N was formed, so the trainer can commit step N as soon as its own
half is on disk.
"""

import msgspec

from trivet.checkpoints.halves import begin_half, finish_half
from trivet.config.layout import RunLayout
from trivet.errors import CheckpointError, MessageRefused
from trivet.orchestrator.buffer import BufferState
from trivet.wire.codec import decode, encode
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import Step

HALF = "orchestrator"
_STATE_FILE = "state.msgpack"


class Progress(msgspec.Struct, kw_only=True):
    """Totals over the run."""

    step: Step = Step(0)
    """The last batch formed."""
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0


class OrchestratorHalf(msgspec.Struct, kw_only=True):
    progress: Progress
    next_group_id: GroupId
    buffer: BufferState
    seed: int
    rollouts_per_example: int
    sizes: dict[str, int]
    """Examples by environment name: the sampler's order depends on them."""


def write_half(layout: RunLayout, half: OrchestratorHalf) -> None:
    """Returns once the half is on disk."""
    directory = begin_half(layout, half.progress.step, HALF)
    (directory / _STATE_FILE).write_bytes(encode(half))
    finish_half(layout, half.progress.step, HALF)


class OwedGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that a half holds: what the history checker compares with events.jsonl."""

    next_group_id: GroupId
    ready: list[GroupId]
    in_flight: list[GroupId]


def read_owed(layout: RunLayout, step: Step) -> OwedGroups:
    """
    Raises:
        CheckpointError: the half is missing or unreadable.
    """
    path = layout.checkpoint_step(step) / HALF / _STATE_FILE
    try:
        half = decode(path.read_bytes(), OrchestratorHalf)
    except (OSError, MessageRefused) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
    return OwedGroups(
        next_group_id=half.next_group_id,
        ready=[group.group_id for group in half.buffer.ready],
        in_flight=list(half.buffer.in_flight),
    )


def read_half(
    layout: RunLayout, step: Step, *, seed: int, rollouts_per_example: int, sizes: dict[str, int]
) -> OrchestratorHalf:
    """
    Raises:
        CheckpointError: missing, unreadable, or made with another seed, group size or other data sets, which would change
            what each group id stands for.
    """
    path = layout.checkpoint_step(step) / HALF / _STATE_FILE
    try:
        half = decode(path.read_bytes(), OrchestratorHalf)
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
    for name, saved, now in (
        ("orchestrator.seed", half.seed, seed),
        ("orchestrator.rollouts_per_example", half.rollouts_per_example, rollouts_per_example),
        ("the environments' sizes", half.sizes, sizes),
    ):
        if saved != now:
            raise CheckpointError(
                f"{name} was {saved} when checkpoint step_{step} was made and is {now} now; the groups that wait in it depend "
                "on it: set it back, or start a new run from the weights"
            )
    return half
