"""Publishes a policy: its directory appears whole, or not at all, under its final name. Called by the trainer's rank 0."""

import os
from collections.abc import Callable
from pathlib import Path

from trivet.algorithms.probe import Probe
from trivet.config.layout import MANIFEST, STABLE, RunLayout
from trivet.errors import WeightsError
from trivet.faults import reach
from trivet.storage.durable import remove_directory, sync_directory, sync_tree, write_atomically, write_json_atomically
from trivet.weights.manifest import Manifest, describe
from trivet.wire.versions import PolicyVersion


def publish(
    layout: RunLayout,
    *,
    version: PolicyVersion,
    run_id: str,
    write: Callable[[Path], None],
    announce: Callable[[Manifest], None] = lambda _: None,
    probe: Probe | None = None,
) -> Manifest:
    """Publish what `write` puts into the directory it is given as policy `version`.

    A directory that an earlier attempt left under the same version is replaced. `STABLE` is written last, after every byte is
    on disk and before the directory gets its name: whoever sees the name sees all, on a shared file system too, where a name
    that was asked for too early may seem absent for a minute.

    Args:
        announce: called when everything is written and no reader can see it yet, so no load precedes it.
        probe: what servers must reproduce with it.
    """
    final = layout.weights_step(version)
    # A process of an earlier attempt, whose machine stood still, may be writing the same version.
    staging = layout.weights / f".{final.name}.{os.uname().nodename}.{os.getpid()}.tmp"
    reach("weight_write.before", step=version)
    remove_directory(staging)
    staging.mkdir(parents=True)
    write(staging)
    reach("weight_write.during", step=version, path=staging)
    _refuse_what_no_manifest_covers(staging)
    sync_tree(staging)
    manifest = describe(staging, version=version, run_id=run_id, probe=probe)
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


def _refuse_what_no_manifest_covers(staging: Path) -> None:
    paths = sorted(staging.iterdir())
    if not paths:
        raise WeightsError(f"{staging} is empty: nothing was written to publish")
    for path in paths:
        if not path.is_file():
            raise WeightsError(f"{path} is not a file; a weights directory is flat")
