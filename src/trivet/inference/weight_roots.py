"""Limits the directories that a server loads weights from, so that a request cannot make it read any other file."""

from collections.abc import Sequence
from pathlib import Path

from trivet.errors import WeightsError


def require_below(roots: Sequence[Path], directory: Path) -> None:
    """Check that `directory` is below one of `roots`.

    Raises:
        WeightsError: it is below none, with links followed.
    """
    resolved = directory.resolve()
    if not any(resolved.is_relative_to(root.resolve()) for root in roots):
        raise WeightsError(
            f"{directory} is not below {' or '.join(map(str, roots))}, from where this server loads weights; start it with the "
            "output_dir of the run, or add a directory to inference.server.weight_dirs"
        )
