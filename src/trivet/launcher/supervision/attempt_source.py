"""The port through which the supervisor asks for the attempts of a run: its processes, and how far it has come."""

from collections.abc import Sequence
from typing import Protocol

from trivet.config.layout import RunLayout
from trivet.config.sections.shared import RunIdentity
from trivet.launcher.logs import RunLog
from trivet.launcher.plan import ProcessSpec
from trivet.wire.events import Event
from trivet.wire.versions import Step


class AttemptSource(Protocol):
    """The port that `launcher.supervision.attempts.Attempts` implements; there every member is described."""

    @property
    def layout(self) -> RunLayout:
        """Paths of the run's files."""
        ...

    @property
    def run(self) -> RunIdentity:
        """Id of the run, and number of the current attempt."""
        ...

    @property
    def from_step(self) -> Step | None:
        """The step that the current attempt resumed from, None for a fresh start."""
        ...

    @property
    def max_steps(self) -> int | None:
        """The last step of the run; None for a run without end."""
        ...

    @property
    def last_commit(self) -> Step | None:
        """Step of the newest committed checkpoint."""
        ...

    @property
    def is_last_step_committed(self) -> bool:
        """True when the run has nothing left to do."""
        ...

    def specs(self) -> Sequence[ProcessSpec]:
        """Return the processes of the current attempt."""
        ...

    def base_urls(self) -> Sequence[str]:
        """Return where the inference servers answer that the run starts."""
        ...

    def teacher_urls(self) -> Sequence[str]:
        """Return where the teacher answers that the run starts."""
        ...

    def begin_next(self, log: RunLog) -> None:
        """Make the next attempt, from the newest whole checkpoint."""
        ...

    def has_completed(self, role: str) -> bool:
        """Return whether `role` recorded that it reached the last step."""
        ...

    def record(self, event: Event) -> None:
        """Append an event of the launcher to events.jsonl."""
        ...
