"""Publishes a policy, so that its directory appears under its final name whole or not at all. Called by the trainer's rank 0."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from trivet.algorithms.probe import Probe
from trivet.config.layout import MANIFEST, STABLE, RunLayout
from trivet.errors import WeightsError
from trivet.faults import reach
from trivet.storage.durable import remove_directory, sync_directory, sync_tree, write_atomically, write_json_atomically
from trivet.weights.manifest import Manifest, make_manifest
from trivet.wire.versions import PolicyVersion


def publish(
    layout: RunLayout,
    *,
    version: PolicyVersion,
    run_id: str,
    write: Callable[[Path], None],
    announce: Callable[[Manifest], None] = lambda _: None,
    probe: Probe | None = None,
    fingerprint: Callable[[Path], str] = lambda _: "",
) -> Manifest:
    """Publish policy `version`.

    A directory that an earlier attempt left under the same version is replaced. `STABLE` is written when every byte of the other
    files is on disk, and before the directory gets its final name. So the name appears only with all files in it. A file that was
    created after the name could seem absent for a minute on a shared file system, once a reader has looked for it.

    Args:
        write: writes the policy's files into the directory that it gets.
        announce: called when all files are written and no reader can see them yet, so no load precedes it.
        probe: the probe for the manifest.
        fingerprint: computes the fingerprint for the manifest from the files in the directory that it gets.
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
    sync_tree(staging)
    manifest = make_manifest(staging, version=version, run_id=run_id, probe=probe)
    manifest = msgspec.structs.replace(manifest, fingerprint=fingerprint(staging))
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


def _require_flat_files(staging: Path) -> None:
    """Refuse an empty directory, and entries that are not files, because a manifest lists only files without a path."""
    paths = sorted(staging.iterdir())
    if not paths:
        raise WeightsError(f"{staging} is empty: nothing was written to publish")
    for path in paths:
        if not path.is_file():
            raise WeightsError(f"{path} is not a file; a weights directory is flat")
