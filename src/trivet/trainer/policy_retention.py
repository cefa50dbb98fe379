"""Decides which published policies are no longer needed, and removes them. Called by `trainer.session` after each step."""

from dataclasses import dataclass

from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.telemetry.telemetry import Telemetry
from trivet.weights.catalog import published_versions
from trivet.weights.retention import LiveReaders, needed_to_resume, reference_version_after, retirable, retire
from trivet.wire.events import Retire
from trivet.wire.versions import PolicyVersion, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRetention:
    """Knows who needs policies: readers, resumes, the loss's reference, and the user who keeps some for ever."""

    layout: RunLayout
    readers: LiveReaders
    from_step: Step
    """The step resumed from, 0 for a fresh run."""
    keep_recent: int
    """Number of versions before the newest that stay too, for servers that lag by design (max_async_level)."""
    resume_lag: int
    """By how many versions the policy of a resumed run's first batch may be older than the checkpoint (`needed_to_resume`)."""
    reference_interval: int | None
    """Steps after which the reference policy is renewed; None: the reference is not a published policy."""
    keep_interval: int | None
    """Versions that are a multiple of it are never removed; None: no such versions."""

    def retire_unneeded(self, telemetry: Telemetry, *, step: int, newest_checkpoint: Step | None) -> None:
        """Remove each policy of `find_unneeded` and record it."""
        for version in self.find_unneeded(step=step, newest_checkpoint=newest_checkpoint):
            retire(self.layout, version)
            telemetry.write_event(Retire(version=version))

    def find_unneeded(self, *, step: int, newest_checkpoint: Step | None) -> list[PolicyVersion]:
        """Return the policies that neither checkpoints nor readers need, oldest first.

        Args:
            step: the newest step taken; a checkpoint of it, or of a later one, is still to come.
            newest_checkpoint: the newest step whose checkpoint was begun, which may not be committed yet.
        """
        published = published_versions(self.layout)
        targets = [*committed_steps(self.layout), self.from_step, newest_checkpoint or self.from_step]
        return retirable(
            published,
            latest=max(published, default=PolicyVersion(0)),
            keep_recent=self.keep_recent,
            in_use=list(self.readers.versions().values()),
            kept=needed_to_resume(targets, lag=self.resume_lag)
            | {reference_version_after(target, interval=self.reference_interval) for target in (*targets, step)},
            keep_interval=self.keep_interval,
        )
