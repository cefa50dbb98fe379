"""Publishes the policy of a step, whose files are written while the next step runs, and removes policies that nobody needs.

Owned by `trainer.session`. Rank 0 writes and removes; the other ranks take part in gathering.

consumes: the learner's weights between two updates
produces: weights/step_N, and its `publish` event before a reader can see the directory
waits for: the policy before it
unblocked by: the disk
"""

import logging
from dataclasses import dataclass, field

import torch

from trivet.algorithms.probe import Probe
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.config.schema.trainer import TrainingConfig
from trivet.storage.disk import explaining_full_disk, require_free_space
from trivet.telemetry.telemetry import Telemetry
from trivet.trainer.background import Background
from trivet.trainer.model.export import Exporter
from trivet.trainer.ranks.world import barrier
from trivet.trainer.step import Learner
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import Manifest
from trivet.weights.publish import publish
from trivet.weights.retention import LiveReaders, needed_to_resume, reference_version_after, retirable, retire
from trivet.wire.events import Publish, Retire
from trivet.wire.versions import PolicyVersion, Step

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Policies:
    """The published policies of a run. At most one is being written."""

    config: TrainingConfig
    layout: RunLayout
    learner: Learner
    exporter: Exporter
    telemetry: Telemetry | None
    """Set on rank 0 only."""
    num_bytes: int
    """Size of one policy on disk, estimated."""
    from_step: Step
    """The step resumed from, 0 for a fresh run."""
    keep_recent: int
    """Number of versions before the newest that stay too, for servers that lag by design (max_async_level)."""
    reference_interval: int | None
    """Steps after which the loss's reference policy is renewed; None: the reference is not a published policy."""
    work: Background = field(init=False)
    readers: LiveReaders = field(init=False)

    def __post_init__(self) -> None:
        self.work = Background("publisher", is_async=self.config.ckpt.async_write)
        self.readers = LiveReaders(self.layout)

    def publish(self, step: Step, *, probe: Probe | None) -> None:
        """Copy the weights and begin to publish them as the policy of `step`. Collective.

        Args:
            probe: what servers must reproduce with these weights.

        Raises:
            DiskFull: the disk is too full for them, or was for the policy before.
        """
        self.work.wait()
        is_main = self.learner.world.is_main
        weights = self.exporter.gather(keep=is_main)
        self.release_memory()
        if is_main:
            require_free_space(self.layout.weights, self.num_bytes, what=f"policy {step}")
            self.work.start(lambda: self._write(step, weights, probe))

    def release_memory(self) -> None:
        """Give the driver the GPU memory that nothing needs until the next step, if `release_gpu_memory` is set. Collective.

        A server takes memory of every rank's GPU as soon as it can read the policy. The next step computes gradients anew.
        """
        if self.config.release_gpu_memory:
            self.learner.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            barrier(self.learner.world)

    def wait_on_every_rank(self) -> None:
        """Wait until the policy that is being published can be read; raise the error of its publication. Collective.

        Ranks that continued alone would wait for rank 0 where less time is allowed, or end before it has written the last good
        weights.
        """
        try:
            self.work.wait()
        finally:
            barrier(self.learner.world)

    def retire_unneeded(self, *, step: int, newest_checkpoint: Step | None) -> None:
        """Remove each policy of `find_unneeded` on rank 0, and record it."""
        if self.telemetry is not None:
            for version in self.find_unneeded(step=step, newest_checkpoint=newest_checkpoint):
                retire(self.layout, version)
                self.telemetry.write_event(Retire(version=version))

    def find_unneeded(self, *, step: int, newest_checkpoint: Step | None) -> list[PolicyVersion]:
        """Return the policies that neither checkpoints nor readers need, oldest first.

        Args:
            step: the newest step taken; a checkpoint of it, or of a later one, is still to come.
            newest_checkpoint: the newest step whose checkpoint was begun, which may not be committed yet.
        """
        published = published_versions(self.layout)
        targets = [*committed_steps(self.layout), self.from_step, newest_checkpoint or self.from_step]
        references = {reference_version_after(target, interval=self.reference_interval) for target in (*targets, step)}
        # A deterministic run samples each batch from the policy that lags by exactly so many; others start from the newest.
        resume_lag = self.keep_recent if self.config.deterministic else 0
        return retirable(
            published,
            latest=max(published, default=PolicyVersion(0)),
            keep_recent=self.keep_recent,
            in_use=list(self.readers.versions().values()),
            kept=needed_to_resume(targets, lag=resume_lag) | references,
            keep_interval=self.config.ckpt.weights.interval,
        )

    def _write(self, step: Step, weights: dict[str, torch.Tensor], probe: Probe | None) -> None:
        def announce(manifest: Manifest) -> None:
            assert self.telemetry is not None
            num_tokens = manifest.probe.num_scored if manifest.probe is not None else 0
            self.telemetry.write_event(Publish(version=manifest.version, digest=manifest.digest, num_probe_tokens=num_tokens))

        with explaining_full_disk(self.layout.weights, what=f"policy {step}", num_bytes=self.num_bytes):
            manifest = publish(
                self.layout,
                announce=announce,
                version=PolicyVersion(step),
                run_id=self.config.run.id,
                write=lambda directory: self.exporter.write(directory, weights),
                probe=probe,
            )
        logger.info("policy published version=%s digest=%s", step, manifest.digest[:12])
