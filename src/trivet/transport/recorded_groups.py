"""Encodes the groups of a step whole, so that another run can train on them without an inference server.

The orchestrator writes the file next to `rollouts.jsonl` with `orchestrator.record_rollouts`, and reads it with
`orchestrator.replay`. It is one MessagePack message compressed with zlib. `tokens.msgpack.z` does not replace it: there
log-probabilities have three digits, which is too few for an importance ratio.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trivet.config.layout import ROLLOUTS_FILE, RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import BatchError, ConfigError, MessageRefused
from trivet.step_directories import list_steps
from trivet.wire.codec import SCHEMA_VERSION, decode, encode
from trivet.wire.rollouts import Group, Rollout, Sample
from trivet.wire.versions import Step

GROUPS_FILE = "groups.msgpack.z"
_LEVEL = 1
"""Compression level of zlib. Higher levels make the file a tenth smaller and take several times as long."""
_MAX_UNPACKED_BYTES = 1 << 33
"""Limit in bytes, enough for a step of 10^8 tokens. It keeps a damaged file from filling the reader's memory."""


class RecordedGroups(msgspec.Struct, kw_only=True):
    """The content of the file: the groups that were trained in one step."""

    schema: int = SCHEMA_VERSION
    """`codec.SCHEMA_VERSION` of the writer."""
    run_id: str
    """The run that sampled them."""
    step: Step
    groups: list[Group]
    """In the order of the batch, as they were before a filter masked samples."""


def pack_groups(groups: Sequence[Group], *, run_id: str, step: Step) -> bytes:
    """Return the content of the file for the groups of batch `step`."""
    recorded = RecordedGroups(run_id=run_id, step=step, groups=[_unmasked_group(group) for group in groups])
    return zlib.compress(encode(recorded), _LEVEL)


def read_groups(path: Path) -> RecordedGroups:
    """Return the groups in the file at `path`.

    Raises:
        BatchError: it is missing, damaged, or written by another schema.
    """
    try:
        unzip = zlib.decompressobj()
        unpacked = unzip.decompress(path.read_bytes(), _MAX_UNPACKED_BYTES)
        if not unzip.eof:
            raise MessageRefused(f"it ends early, or holds more than {_MAX_UNPACKED_BYTES} bytes")
        recorded = decode(unpacked, RecordedGroups)
    except (OSError, zlib.error, MessageRefused) as exc:
        raise BatchError(f"{path} cannot be read: {exc}") from exc
    if recorded.schema != SCHEMA_VERSION:
        raise BatchError(f"{path} has schema {recorded.schema}, this version reads {SCHEMA_VERSION}: replay it with its own")
    return recorded


def recorded_files(directory: Path) -> list[Path]:
    """Return the files of the record in the output directory `directory`, in the order of their steps."""
    layout = RunLayout(directory)
    return [layout.rollouts_step(step) / GROUPS_FILE for step in list_steps(layout.rollouts, marker=ROLLOUTS_FILE)]


def require_replayable(config: OrchestratorConfig) -> None:
    """Check, before anything is started, that `orchestrator.replay` holds what training needs.

    Raises:
        ConfigError: it holds no rollouts, lacks their tokens and log-probabilities, or groups of another size.
    """
    if config.replay is None:
        return
    key = f"orchestrator.replay ({config.replay})"
    if config.replay.resolve() == config.output_dir.resolve():
        raise ConfigError(f"{key} is output_dir: a replay is a run of its own; choose another output_dir")
    files = recorded_files(config.replay)
    if not files:
        raise ConfigError(f"{key} holds no rollouts/step_N/{ROLLOUTS_FILE}: give the output_dir of a run that trained a step")
    if missing := [file.parent.name for file in files if not file.exists()]:
        raise ConfigError(
            f"{key} lacks the tokens and log-probabilities of {len(missing)} of {len(files)} steps, first "
            f"{missing[0]}/{GROUPS_FILE}: it was not recorded with orchestrator.record_rollouts = true; record a run with that key"
        )
    try:
        recorded = read_groups(files[0])
    except BatchError as exc:
        raise ConfigError(f"{key} cannot be replayed: {exc}") from exc
    sizes = sorted({len(group.rollouts) for group in recorded.groups})
    if sizes != [config.rollouts_per_example]:
        raise ConfigError(
            f"orchestrator.rollouts_per_example ({config.rollouts_per_example}) must be that of the recorded groups in {key}, "
            f"{', '.join(map(str, sizes)) or 'none'}; set it"
        )


def _unmasked_group(group: Group) -> Group:
    return msgspec.structs.replace(group, rollouts=[_unmasked_rollout(rollout) for rollout in group.rollouts])


def _unmasked_rollout(rollout: Rollout) -> Rollout:
    return msgspec.structs.replace(rollout, advantage=0.0, samples=[_unmasked(sample) for sample in rollout.samples])


def _unmasked(sample: Sample) -> Sample:
    """Return the sample as it was before a filter masked it: the replaying run has filters of its own."""
    if sample.masked is None:
        return sample
    masked = sample.masked
    return msgspec.structs.replace(sample, loss_mask_T=masked.loss_mask_T, logprobs_T=masked.logprobs_T, masked=None)
