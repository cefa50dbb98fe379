"""Prints for the launcher: plain lines, and on a terminal a bar below them that says how far the run is and what it waits for."""

from typing import TYPE_CHECKING, TextIO

from trivet.wire.status import RunStatus

if TYPE_CHECKING:
    from rich.progress import Progress


class Terminal:
    """Prints whole lines as they are. Raises OSError when the terminal is gone."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._progress = make_progress(file, follows_prints=False) if file.isatty() else None

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        if self._progress is not None and self._progress.live.is_started:
            self._progress.console.out(line, highlight=False)
        else:
            print(line, file=self._file, flush=True)

    def show_progress(self, *, step: int, max_steps: int | None, doing: str) -> None:
        """Update the bar; nothing where lines go to a file or a pipe.

        Args:
            step: the last finished one; it may be smaller than before, after a restart.
            max_steps: None for a run without end.
        """
        if self._progress is None:
            return
        if not self._progress.tasks:
            self._progress.add_task("", total=max_steps, doing=doing)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=step, total=max_steps, doing=doing)
        self._progress.refresh()

    def close(self) -> None:
        """Remove the bar. May be called again."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def describe_activity(status: RunStatus) -> str:
    """Say what the trainer does, else what the orchestrator does: the activity that the run waits for.

    Returns:
        `waits for batch 12 (filling batch 12)`, `training step 12`, or `starting`.
    """
    doing = {role.name: role.reports[0] for role in status.roles if role.reports}
    trainer, orchestrator = doing.get("trainer"), doing.get("orchestrator")
    if trainer is None:
        return orchestrator.activity if orchestrator is not None else "starting"
    if not trainer.waits_for:
        return trainer.activity
    behind = f" ({orchestrator.activity})" if orchestrator is not None and trainer.waits_for == "orchestrator" else ""
    return f"waits for {trainer.activity}{behind}"


def finished_step(status: RunStatus) -> int:
    """Return the last step that a trainer rank of this attempt has finished."""
    return max((report.step for role in status.roles if role.name == "trainer" for report in role.reports), default=0)


def make_progress(file: TextIO, *, follows_prints: bool) -> "Progress":
    """Make the bar of a run: the step, the time so far and left, and what the run does (the field `doing`).

    Args:
        follows_prints: stays below what anybody in this process prints, from a thread of its own. False leaves standard output
            alone, and the bar changes only when it is refreshed.
    """
    from rich.console import Console  # here: most outputs are no terminal, and `--help` and `--dry-run` have no bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}", markup=False),
        console=Console(file=file),
        auto_refresh=follows_prints,
        redirect_stdout=follows_prints,
        redirect_stderr=follows_prints,
        transient=True,
    )
