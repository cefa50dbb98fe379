"""Writes trained batches and groups to disk, and reads them for training again: batches without an orchestrator, groups without
servers.

`batches/step_N.msgpack` (`trainer.data.record`) holds the encoded batch that the trainer received. It does not name the run or the
attempt, so equal batches make equal files. The orchestrator writes `groups.msgpack.z` next to `rollouts.jsonl`: one MessagePack
message, compressed with zlib. `trivet view` shows tokens from it, and another run can train on it (`orchestrator.replay`). Without
`orchestrator.record_rollouts` the file leaves out what only a replay needs, and takes less disk space.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from trivet.config.layout import BATCH_SUFFIX, ROLLOUTS_FILE, RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import BatchError, ConfigError, MessageRefused
from trivet.key_names import key_name
from trivet.step_directories import list_steps
from trivet.storage.durable import write_atomically
from trivet.transport.messages import BatchReceiver
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.codec import SCHEMA_VERSION, decode, encode
from trivet.wire.rollouts import Group, Rollout, Sample
from trivet.wire.versions import Step

GROUPS_FILE = "groups.msgpack.z"
_ZLIB_LEVEL = 1
"""Compression level of zlib. Higher levels make the file a tenth smaller and take several times as long."""
_MAX_UNPACKED_BYTES = 1 << 33
"""Limit of an unpacked file in bytes, enough for a step of 10^8 tokens. A damaged file cannot fill the reader's memory."""


class RecordedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a file batches/step_N.msgpack."""

    schema: int
    """`codec.SCHEMA_VERSION` of the writer."""
    checksum: int
    """CRC-32 of the payload."""
    payload: bytes
    """An encoded `wire.batches.Batch`."""


def record_batch(layout: RunLayout, batch: Batch) -> None:
    """Write the batch, and return once it is on disk."""
    payload = encode(batch)
    recorded = RecordedBatch(schema=SCHEMA_VERSION, checksum=zlib.crc32(payload), payload=payload)
    write_atomically(layout.recorded_batch(batch.step), encode(recorded))


def recorded_steps(layout: RunLayout) -> list[Step]:
    """Return the steps whose batches are on disk, oldest first."""
    return [Step(step) for step in list_steps(layout.batches, suffix=BATCH_SUFFIX)]


def read_recorded(layout: RunLayout, step: Step) -> Batch:
    """Return the recorded batch of `step`.

    Raises:
        BatchError: the batch was not recorded, was recorded with another schema, or is damaged.
    """
    path = layout.recorded_batch(step)
    try:
        recorded = decode(path.read_bytes(), RecordedBatch)
        if recorded.schema != SCHEMA_VERSION:
            raise BatchError(
                f"{path} has schema {recorded.schema}, this version reads {SCHEMA_VERSION}: replay it with its own"
            )
        if zlib.crc32(recorded.payload) != recorded.checksum:
            raise BatchError(f"{path} does not match its checksum: the file was altered")
        return decode(recorded.payload, Batch)
    except FileNotFoundError as exc:
        steps = recorded_steps(layout)
        recorded_range = f"steps {steps[0]} to {steps[-1]}" if steps else "none"
        raise BatchError(
            f"batch {step} was not recorded in {layout.batches}, which holds {recorded_range}; lower {key_name('max_steps')}"
        ) from exc
    except MessageRefused as exc:
        raise BatchError(f"{path} cannot be read: {exc}") from exc


class RecordingReceiver:
    """A BatchReceiver that records the batches which another receiver receives, if they are trained on."""

    def __init__(self, receiver: BatchReceiver, *, layout: RunLayout) -> None:
        self._receiver = receiver
        self._layout = layout
        self.close = receiver.close

    def receive(self, step: Step) -> Batch:
        """Receive a batch, and record it if it is trained on."""
        batch = self._receiver.receive(step)
        if batch.purpose is BatchPurpose.TRAIN:
            record_batch(self._layout, batch)
        return batch


class ReplayReceiver:
    """A BatchReceiver over the batches that the run in `root` recorded, after an empty probe."""

    def __init__(self, root: Path, *, from_step: Step) -> None:
        """Read no file yet.

        Args:
            from_step: the last step already trained. The trainer receives a batch of this step first: it is the probe.
        """
        self._layout = RunLayout(root)
        self._from_step = from_step

    def receive(self, step: Step) -> Batch:
        """Return the recorded batch of `step`, or an empty probe for `from_step`."""
        if step == self._from_step:
            return Batch(step=step, purpose=BatchPurpose.PROBE)
        # The flag is about the checkpoint of the recorded run. This run has no orchestrator, and no part of one.
        return msgspec.structs.replace(read_recorded(self._layout, step), has_orchestrator_part=False)

    def close(self) -> None:
        """Do nothing: no file stays open."""


class RecordedGroups(msgspec.Struct, kw_only=True):
    """Content of a file `groups.msgpack.z`: the groups that were trained in one step."""

    schema: int = SCHEMA_VERSION
    """`codec.SCHEMA_VERSION` of the writer."""
    run_id: str
    """The run that sampled them."""
    step: Step
    is_replayable: bool = True
    """False when messages are left out and log-probabilities have three digits: enough to colour tokens, too few for an importance
    ratio."""
    groups: list[Group]
    """The groups in the order of the batch, which is also the order of the lines of `rollouts.jsonl`."""


def pack_groups(groups: Sequence[Group], *, run_id: str, step: Step, is_replayable: bool) -> bytes:
    """Return the content of the file for the groups of batch `step`."""
    if not is_replayable:
        groups = [
            msgspec.structs.replace(
                group,
                rollouts=[
                    Rollout(
                        index=rollout.index,
                        reward=rollout.reward,
                        samples=[_round_logprobs(sample) for sample in rollout.samples],
                    )
                    for rollout in group.rollouts
                ],
            )
            for group in groups
        ]
    recorded = RecordedGroups(run_id=run_id, step=step, is_replayable=is_replayable, groups=list(groups))
    return zlib.compress(encode(recorded), _ZLIB_LEVEL)


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
        BatchError: the file is missing, damaged, written with another schema, or not replayable.
    """
    try:
        recorded = unpack_groups(path.read_bytes())
    except (OSError, MessageRefused) as exc:
        raise BatchError(f"{path} cannot be read: {exc}") from exc
    if not recorded.is_replayable:
        raise BatchError(f"{path} was not recorded with orchestrator.record_rollouts = true; record a run with that key")
    return recorded


def recorded_files(directory: Path) -> list[Path]:
    """Return the `groups.msgpack.z` of each step in the output directory `directory`, in the order of steps. Some may not exist."""
    layout = RunLayout(directory)
    return [layout.rollouts_step(step) / GROUPS_FILE for step in list_steps(layout.rollouts, marker=ROLLOUTS_FILE)]


def require_replayable(config: OrchestratorConfig) -> None:
    """Check, before anything is started, that `orchestrator.replay` holds what training needs.

    Raises:
        ConfigError: the directory holds no rollouts, lacks their tokens and log-probabilities, or has groups of another size.
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


def _round_logprobs(sample: Sample) -> Sample:
    """Return `sample` with log-probabilities of three digits, which compress better, and without those of the teacher."""

    def to_three_digits(logprobs_T: np.ndarray) -> np.ndarray:
        return logprobs_T.astype(np.float16).astype(np.float32)

    masked = sample.masked and msgspec.structs.replace(sample.masked, logprobs_T=to_three_digits(sample.masked.logprobs_T))
    return msgspec.structs.replace(
        sample, logprobs_T=to_three_digits(sample.logprobs_T), teacher_logprobs_T=None, masked=masked
    )
