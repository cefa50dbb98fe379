"""Lists and removes the entries `step_N` of a directory. Every package that keeps one directory or file per step uses it."""

from pathlib import Path

from trivet.config.layout import parse_step
from trivet.storage.durable import is_listed, remove_directory


def list_steps(directory: Path, *, marker: str | None = None, suffix: str = "") -> dict[int, Path]:
    """Return the path of each `directory/step_N` by N, in rising order. A missing directory has none.

    Args:
        marker: if given, only directories that contain a file of this name count.
        suffix: if given, files called `step_N<suffix>` are listed in place of directories.
    """
    if not is_listed(directory) or not directory.is_dir():
        return {}
    paths = {
        step: path
        for path in directory.iterdir()
        if path.name.endswith(suffix)
        and (step := parse_step(path.name.removesuffix(suffix))) is not None
        and (marker is None or (path / marker).exists())
    }
    return dict(sorted(paths.items()))


def discard_after(directory: Path, step: int, *, marker: str | None = None, suffix: str = "") -> None:
    """Remove the entries of steps after `step`, because the run takes these steps again, and directories without `marker`.

    A directory without its marker is incomplete. `marker` and `suffix` are those of `list_steps`.
    """
    complete = list_steps(directory, marker=marker, suffix=suffix)
    for number, path in list_steps(directory, suffix=suffix).items():
        if number > step or number not in complete:
            if suffix:
                path.unlink(missing_ok=True)
            else:
                remove_directory(path, marker=marker)


def discard_unfinished(directory: Path) -> None:
    """Remove every `.step_N.tmp`: a directory that was incomplete when its writer ended."""
    for path in sorted(directory.glob(".step_*.tmp")):
        remove_directory(path)
