"""Lists and removes what lies in a directory under the names `step_N`. Used by every package that keeps one thing per step."""

from pathlib import Path

from trivet.config.layout import parse_step
from trivet.storage.durable import is_listed, remove_directory


def list_steps(directory: Path, *, marker: str | None = None, suffix: str = "") -> dict[int, Path]:
    """Map each N to `directory/step_N`, ascending; a missing directory is empty.

    A `marker` leaves only the directories that hold this file; a `suffix` behind `step_N` lists files instead of directories.
    """
    if not is_listed(directory) or not directory.is_dir():
        return {}
    found = {
        step: path
        for path in directory.iterdir()
        if path.name.endswith(suffix)
        and (step := parse_step(path.name.removesuffix(suffix))) is not None
        and (marker is None or (path / marker).exists())
    }
    return dict(sorted(found.items()))


def discard_after(directory: Path, step: int, *, marker: str | None = None, suffix: str = "") -> None:
    """Remove what belongs to steps later than `step`, which happen again, and every directory without a given `marker`."""
    whole = list_steps(directory, marker=marker, suffix=suffix)
    for found, path in list_steps(directory, suffix=suffix).items():
        if found > step or found not in whole:
            if suffix:
                path.unlink(missing_ok=True)
            else:
                remove_directory(path, marker=marker)


def discard_unfinished(directory: Path) -> None:
    """Remove every `.step_N.tmp`: what was being written when its writer ended."""
    for path in sorted(directory.glob(".step_*.tmp")):
        remove_directory(path)
