"""The orchestrator's part of a checkpoint: everything that would otherwise be lost (design invariant 3).

It is written before batch N is sent, as of the moment batch N was formed, so the trainer can commit step N as soon as its own
part is on disk.
"""

from collections.abc import Mapping

import msgspec

from trivet.checkpoints.commit import ORCHESTRATOR, begin_part, finish_part
from trivet.checkpoints.orchestrator_part import SCHEMA, STATE_FILE, read_state
from trivet.checkpoints.settings import DataRecord, write_data_record, write_settings
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import CheckpointError
from trivet.faults import reach
from trivet.key_names import key_name
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.sampler import SamplerState
from trivet.wire.codec import encode
from trivet.wire.groups import EnvironmentInfo
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
    """Returns once the part is on disk, with the configuration that made it and the record of its `data`."""
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
    """Return the record of the data of every environment, by its name."""
    records: dict[str, DataRecord] = {}
    for name, info in infos.items():
        records[f"environment {name!r}"] = DataRecord(num_records=info.num_examples, digest=info.train_digest)
        records[f"environment {name!r}, evaluation"] = DataRecord(num_records=info.num_eval_examples, digest=info.eval_digest)
    return records


def read_part(layout: RunLayout, step: Step, *, rollouts_per_example: int) -> OrchestratorPart:
    """Return the orchestrator's part of checkpoint `step`."""
    part = read_state(layout, step, OrchestratorPart)
    if part.rollouts_per_example != rollouts_per_example:
        raise CheckpointError(
            f"{key_name('orchestrator.rollouts_per_example')} was {part.rollouts_per_example} when checkpoint step_{step} was "
            f"made and is {rollouts_per_example} now; the groups that wait in it have that size: set it back, or start a new run "
            f"from {layout.weights_step(step)}"
        )
    return part
