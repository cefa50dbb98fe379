"""Keeps the groups of a step on disk: `trivet view` shows their tokens, and another run can train on them (`orchestrator.replay`).

The orchestrator writes `groups.msgpack.z` next to `rollouts.jsonl`: one MessagePack message, compressed with zlib. Without
`orchestrator.record_rollouts` it leaves out what only a replay needs, so that the file takes less disk space.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

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
    is_replayable: bool = True
    """False where messages are left out, and log-probabilities have three digits: enough for colours of tokens, too few for an
    importance ratio."""
    groups: list[Group]
    """In the order of the batch, and so of the lines of `rollouts.jsonl`."""


def pack_groups(groups: Sequence[Group], *, run_id: str, step: Step, is_replayable: bool) -> bytes:
    """Return the content of the file for the groups of batch `step`."""
    kept = list(groups) if is_replayable else [_shorten(group) for group in groups]
    return zlib.compress(encode(RecordedGroups(run_id=run_id, step=step, is_replayable=is_replayable, groups=kept)), _LEVEL)


def unpack_groups(data: bytes) -> RecordedGroups:
    """Decode the content of the file.

    Raises:
        MessageRefused: `data` is damaged, or written by another schema.
    """
    unzip = zlib.decompressobj()
    try:
        unpacked = unzip.decompress(data, _MAX_UNPACKED_BYTES)
    except zlib.error as exc:
        raise MessageRefused(str(exc)) from exc
    if not unzip.eof:
        raise MessageRefused(f"it ends early, or holds more than {_MAX_UNPACKED_BYTES} bytes")
    recorded = decode(unpacked, RecordedGroups)
    if recorded.schema != SCHEMA_VERSION:
        raise MessageRefused(f"it has schema {recorded.schema}, this version reads {SCHEMA_VERSION}")
    return recorded


def read_groups(path: Path) -> RecordedGroups:
    """Return the groups in the file at `path`, for a replay.

    Raises:
        BatchError: it is missing, damaged, written by another schema, or not replayable.
    """
    try:
        recorded = unpack_groups(path.read_bytes())
    except (OSError, MessageRefused) as exc:
        raise BatchError(f"{path} cannot be read: {exc}") from exc
    if not recorded.is_replayable:
        raise BatchError(f"{path} was not recorded with orchestrator.record_rollouts = true; record a run with that key")
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
        recorded, _ = read_groups(files[0]), read_groups(files[-1])
    except BatchError as exc:
        raise ConfigError(f"{key} cannot be replayed: {exc}") from exc
    sizes = sorted({len(group.rollouts) for group in recorded.groups})
    if sizes != [config.rollouts_per_example]:
        raise ConfigError(
            f"orchestrator.rollouts_per_example ({config.rollouts_per_example}) must be that of the recorded groups in {key}, "
            f"{', '.join(map(str, sizes)) or 'none'}; set it"
        )


def _shorten(group: Group) -> Group:
    rollouts = [
        Rollout(index=rollout.index, reward=rollout.reward, samples=[_round(sample) for sample in rollout.samples])
        for rollout in group.rollouts
    ]
    return msgspec.structs.replace(group, rollouts=rollouts)


def _round(sample: Sample) -> Sample:
    def rounded(logprobs_T: np.ndarray) -> np.ndarray:
        return logprobs_T.astype(np.float16).astype(np.float32)

    masked = sample.masked and msgspec.structs.replace(sample.masked, logprobs_T=rounded(sample.masked.logprobs_T))
    return msgspec.structs.replace(sample, logprobs_T=rounded(sample.logprobs_T), teacher_logprobs_T=None, masked=masked)
