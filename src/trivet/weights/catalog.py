"""Lists the policies that are published in weights/, and removes the policies that a resumed run will publish again."""

from trivet.config.layout import STABLE, RunLayout
from trivet.step_directories import discard_after, discard_unfinished, list_steps
from trivet.storage.durable import sweep_removed
from trivet.weights.retention import forget_readers_after
from trivet.wire.versions import PolicyVersion


def published_versions(layout: RunLayout) -> list[PolicyVersion]:
    """Return the versions with a `STABLE` marker, oldest first."""
    return [PolicyVersion(step) for step in list_steps(layout.weights, marker=STABLE)]


def latest_version(layout: RunLayout) -> PolicyVersion | None:
    """Return the version of the newest published policy; None before the first."""
    return max(published_versions(layout), default=None)


def discard_policies_after(layout: RunLayout, version: PolicyVersion) -> None:
    """Remove every policy newer than `version`, all unfinished policies, and readers' acknowledgements of newer versions.

    Called once by the trainer when a run starts from step `version`, before it publishes anything.
    """
    if not layout.weights.is_dir():
        return
    discard_unfinished(layout.weights)
    discard_after(layout.weights, version, marker=STABLE)
    sweep_removed(layout.weights)
    forget_readers_after(layout, version)
