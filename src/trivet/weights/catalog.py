"""Which policies lie in weights/: those published completely, and what a run that goes back must remove."""

from trivet.config.layout import STABLE, RunLayout, parse_step
from trivet.durable import remove_directory, sweep_removed
from trivet.weights.retention import forget_readers_after
from trivet.wire.versions import PolicyVersion


def published_versions(layout: RunLayout) -> list[PolicyVersion]:
    """Versions with a `STABLE` marker, oldest first."""
    if not layout.weights.is_dir():
        return []
    steps = (parse_step(path.name) for path in layout.weights.iterdir() if (path / STABLE).exists())
    return sorted(PolicyVersion(step) for step in steps if step is not None)


def latest_version(layout: RunLayout) -> PolicyVersion | None:
    """The newest published policy, None before the first."""
    return max(published_versions(layout), default=None)


def discard_after(layout: RunLayout, version: PolicyVersion) -> None:
    """Remove every policy newer than `version`, all that was never finished, and what readers said about either.

    Called once by the trainer when a run starts from step `version`, before it publishes anything.
    """
    if not layout.weights.is_dir():
        return
    for path in sorted(layout.weights.iterdir()):
        step = parse_step(path.name)
        is_staging = path.name.startswith(".step_") and path.name.endswith(".tmp")
        is_obsolete = step is not None and (step > version or not (path / STABLE).exists())
        if is_staging or is_obsolete:
            remove_directory(path, marker=STABLE)
    sweep_removed(layout.weights)
    forget_readers_after(layout, version)
