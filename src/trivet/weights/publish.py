"""Publishes a policy, so that its directory appears under its final name whole or not at all. Called by the trainer's rank 0."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trivet.algorithms.probe import Probe
from trivet.config.layout import DELTA, MANIFEST, STABLE, RunLayout
from trivet.errors import WeightsError
from trivet.faults import reach
from trivet.storage.durable import (
    hash_file,
    remove_directory,
    sync_directory,
    sync_tree,
    write_atomically,
    write_json_atomically,
)
from trivet.weights.delta import MAX_DELTA_SHARE, write_delta
from trivet.weights.manifest import DeltaRecord, Manifest, make_manifest
from trivet.wire.versions import PolicyVersion

logger = logging.getLogger(__name__)

_MAX_CHAIN = 8
"""Most deltas of a policy. A server that is further behind fetches the whole policy."""


def publish(
    layout: RunLayout,
    *,
    version: PolicyVersion,
    run_id: str,
    write: Callable[[Path], None],
    announce: Callable[[Manifest], None] = lambda _: None,
    probe: Probe | None = None,
    deltas: "DeltaPublisher | None" = None,
) -> Manifest:
    """Publish policy `version`.

    A directory that an earlier attempt left under the same version is replaced. `STABLE` is written when every byte of the other
    files is on disk, and before the directory gets its final name. So the name appears only with all files in it. A file that was
    created after the name could seem absent for a minute on a shared file system, once a reader has looked for it.

    Args:
        write: writes the policy's files into the directory that it gets.
        announce: called when all files are written and no reader can see them yet, so no load precedes it.
        probe: the probe for the manifest.
        deltas: adds the delta from the policy before.
    """
    final = layout.weights_step(version)
    # A process of an earlier attempt, whose machine was suspended, may still write the same version.
    staging = layout.weights / f".{final.name}.{os.uname().nodename}.{os.getpid()}.tmp"
    reach("weight_write.before", step=version)
    remove_directory(staging)
    staging.mkdir(parents=True)
    write(staging)
    reach("weight_write.during", step=version, path=staging)
    _require_flat_files(staging)
    manifest = make_manifest(staging, version=version, run_id=run_id, probe=probe)
    if deltas is not None:
        manifest = deltas.add(staging, manifest)
    sync_tree(staging)
    write_json_atomically(staging / MANIFEST, manifest)
    reach("weight_write.after", step=version, path=staging)
    announce(manifest)
    write_atomically(staging / STABLE, b"")
    reach("stable.before", step=version, path=staging)
    remove_directory(final, marker=STABLE)
    staging.rename(final)
    sync_directory(layout.weights)
    reach("stable.after", step=version, path=final)
    return manifest


@dataclass(slots=True)
class DeltaPublisher:
    """Adds to each policy the delta from the one before it. A policy without one is an anchor, as a session's first always is."""

    layout: RunLayout
    anchor_interval: int
    """Policies of every multiple of this are anchors."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Figures of the newest delta, by the names of metrics. Whoever reports them empties it."""
    _base: Manifest | None = None
    _next_version: int = 0
    """The first version that gets a delta again, after one that got none because it would have been too large or for an error."""

    def add(self, directory: Path, manifest: Manifest) -> Manifest:
        """Write the delta to the policy in `directory`; return the policy's manifest, with its deltas if there are any."""
        base, self._base = self._base, manifest
        version, started = manifest.version, time.monotonic()
        if base is None or base.version >= version or version % self.anchor_interval == 0 or version < self._next_version:
            return manifest
        base_directory, path = self.layout.weights_step(base.version), directory / DELTA.format(base.version)
        try:
            write_delta(base_directory, directory, path, old=base, new=manifest)
            record = DeltaRecord(base_version=base.version, base_digest=base.digest, file=hash_file(path))
            deltas = [record]
            for older in reversed(base.deltas[1 - _MAX_CHAIN :]):
                if sum(delta.file.num_bytes for delta in (older, *deltas)) > MAX_DELTA_SHARE * manifest.num_bytes:
                    break
                (directory / older.name).hardlink_to(base_directory / older.name)
                deltas.insert(0, older)
        except (OSError, WeightsError) as exc:  # the policy is complete without its deltas
            logger.info("policy published without delta version=%s reason=%s", version, exc)
            self._next_version = version + self.anchor_interval
            for delta in directory.glob(DELTA.format("*")):
                delta.unlink()
            return manifest
        self.metrics = {"weights/delta_bytes": record.file.num_bytes, "time/write_delta": time.monotonic() - started}
        self._base = msgspec.structs.replace(manifest, deltas=tuple(deltas))
        return self._base


def _require_flat_files(staging: Path) -> None:
    """Refuse an empty directory, and entries that are not files, because a manifest lists only files without a path."""
    paths = sorted(staging.iterdir())
    if not paths:
        raise WeightsError(f"{staging} is empty: nothing was written to publish")
    for path in paths:
        if not path.is_file():
            raise WeightsError(f"{path} is not a file; a weights directory is flat")
