"""Writes the orchestrator's files of a step: its part of a checkpoint, and the rollouts that the step trains on.

The checkpoint part holds all state that the orchestrator cannot compute again. It has the state at the moment when batch N was
formed, and is written before batch N is sent. So the trainer can commit step N as soon as its own part is on disk.

`rollouts/step_N/rollouts.jsonl` is for a human to read. `groups.msgpack.z` has the tokens: `trivet view` shows from it how likely
each token was and which policy sampled it, and another run can train on the groups (`orchestrator.replay`).
"""

from collections.abc import Mapping, Sequence

import msgspec

from trivet.checkpoints.commit import ORCHESTRATOR, begin_part, finish_part
from trivet.checkpoints.orchestrator_part import SCHEMA, STATE_FILE, read_state
from trivet.checkpoints.settings import DataRecord, write_data_record, write_settings
from trivet.config.layout import ROLLOUTS_FILE, RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import CheckpointError
from trivet.faults import reach
from trivet.key_names import key_name
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.sampler import SamplerState
from trivet.storage.durable import digest_of, hash_bytes, replace_file
from trivet.transport.recording import GROUPS_FILE, pack_groups
from trivet.wire.codec import encode
from trivet.wire.events import RolloutsWritten
from trivet.wire.groups import EnvironmentInfo
from trivet.wire.rollouts import Group, RolloutRecord
from trivet.wire.versions import Step


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


def write_part(
    layout: RunLayout, part: OrchestratorPart, *, config: OrchestratorConfig, data: Mapping[str, DataRecord] | None = None
) -> None:
    """Write the part, the configuration of the run and the record of its `data`. Return once they are on disk."""
    step = part.progress.step
    reach("orchestrator_half.before", step=step)
    directory = begin_part(layout, step, ORCHESTRATOR)
    write_settings(directory, config)
    write_data_record(directory, data or {})
    (directory / STATE_FILE).write_bytes(encode(part))
    reach("orchestrator_half.during", step=step, path=directory)
    finish_part(layout, step, ORCHESTRATOR)
    reach("orchestrator_half.after", step=step)


def data_of(infos: Mapping[str, EnvironmentInfo]) -> dict[str, DataRecord]:
    """Return a record of each data set, by a text that names it: a training and an evaluation set for every environment."""
    records: dict[str, DataRecord] = {}
    for name, info in infos.items():
        records[f"environment {name!r}"] = DataRecord(num_records=info.num_examples, digest=info.train_digest)
        records[f"environment {name!r}, evaluation"] = DataRecord(num_records=info.num_eval_examples, digest=info.eval_digest)
    return records


def read_part(layout: RunLayout, step: Step, *, rollouts_per_example: int) -> OrchestratorPart:
    """Return the orchestrator's part of checkpoint `step`.

    Raises:
        CheckpointError: the groups in it have another size than `rollouts_per_example`, or the part cannot be read.
    """
    part = read_state(layout, step, OrchestratorPart)
    if part.rollouts_per_example != rollouts_per_example:
        raise CheckpointError(
            f"{key_name('orchestrator.rollouts_per_example')} was {part.rollouts_per_example} when checkpoint step_{step} was "
            f"made and is {rollouts_per_example} now; the groups that wait in it have that size: set it back, or start a new run "
            f"from {layout.weights_step(step)}"
        )
    return part


def write_rollouts(
    layout: RunLayout, step: Step, groups: Sequence[Group], *, run_id: str = "", is_replayable: bool = False
) -> RolloutsWritten:
    """Write the files of a step. Each file appears whole or not at all.

    The groups are written first, so that they are there for whoever finds the rollouts.

    Args:
        is_replayable: keep in the groups what a run needs to train on them.

    Returns:
        The event that describes the files.
    """
    records = [
        RolloutRecord(
            group_id=group.group_id,
            env=group.env,
            example_id=group.example_id,
            index=rollout.index,
            reward=rollout.reward,
            advantage=rollout.advantage,
            scores=rollout.scores,
            num_turns=rollout.num_turns,
            is_truncated=rollout.is_truncated,
            ran_out_of_context=rollout.ran_out_of_context,
            versions=[run for sample in rollout.samples for run in sample.versions],
            prompt=rollout.prompt,
            completion=rollout.completion,
        )
        for group in groups
        for rollout in group.rollouts
    ]
    contents = {
        GROUPS_FILE: pack_groups(groups, run_id=run_id, step=step, is_replayable=is_replayable),
        ROLLOUTS_FILE: msgspec.json.Encoder().encode_lines(records),
    }
    for name, content in contents.items():
        replace_file(layout.rollouts_step(step) / name, content)
    digest = digest_of({name: hash_bytes(content) for name, content in contents.items()})
    return RolloutsWritten(step=step, num_rollouts=len(records), digest=digest)
