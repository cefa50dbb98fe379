"""Publishes the policy of a step: copies the weights at once, and writes their files while the next step runs.

Called by `trainer.session`. Rank 0 writes; the other ranks take part in gathering.

consumes: the learner's weights between two updates
produces: weights/step_N, and its `publish` event before a reader can see the directory
waits for: the policy before it
unblocked by: the disk
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trivet.algorithms.probe import Probe
from trivet.config.layout import RunLayout
from trivet.storage.disk import explaining_full_disk, require_free_space
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.background import Background
from trivet.trainer.model.export import Exporter
from trivet.trainer.ranks.world import World, barrier
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.wire.events import Publish
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPublisher:
    """Writes at most one policy at a time."""

    layout: RunLayout
    world: World
    exporter: Exporter
    run_id: str
    num_bytes: int
    """Size of one policy on disk, estimated."""
    telemetry: Telemetry | None
    """Set on rank 0 only."""
    work: Background
    release_memory: Callable[[], None] | None = None
    """Returns to the driver the GPU memory of this rank that nothing needs until the next step. None: the rank keeps it."""

    def publish(self, step: Step, *, probe: Probe | None) -> None:
        """Copy the weights and begin to publish them as the policy of `step`. Collective.

        Args:
            probe: what servers must reproduce with these weights.

        Raises:
            DiskFull: the disk is too full for them, or was for the policy before.
        """
        self.work.wait()
        weights = self.exporter.gather(keep=self.world.is_main)
        self.release_on_every_rank()
        if self.world.is_main:
            require_free_space(self.layout.weights, self.num_bytes, what=f"policy {step}")
            self.work.start(lambda: self._write(step, weights, probe))

    def release_on_every_rank(self) -> None:
        """Release unneeded GPU memory on every rank, if `release_memory` is set. Collective.

        A server takes memory of every rank's GPU as soon as it can read the policy.
        """
        if self.release_memory is not None:
            self.release_memory()
            barrier(self.world)

    def wait_on_every_rank(self) -> None:
        """Wait until the policy that is being published can be read; raise the error of its publication. Collective.

        Ranks that continued alone would wait for rank 0 where less time is allowed, or end before it has written the last good
        weights.
        """
        try:
            self.work.wait()
        finally:
            barrier(self.world)

    def _write(self, step: Step, weights: dict[str, torch.Tensor], probe: Probe | None) -> None:
        with explaining_full_disk(self.layout.weights, what=f"policy {step}", num_bytes=self.num_bytes):
            manifest = publish(
                self.layout,
                announce=self._announce,
                version=PolicyVersion(step),
                run_id=self.run_id,
                write=lambda directory: self.exporter.write(directory, weights),
                probe=probe,
            )
        logger.info("policy published version=%s digest=%s", step, manifest.digest[:12])

    def _announce(self, manifest: Manifest) -> None:
        assert self.telemetry is not None
        num_tokens = manifest.probe.num_scored if manifest.probe is not None else 0
        self.telemetry.write_event(Publish(version=manifest.version, digest=manifest.digest, num_probe_tokens=num_tokens))
