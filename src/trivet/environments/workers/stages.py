"""Records the stage of each running group for another thread to read: a blocked event loop cannot answer itself."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """The two stages of a group: it waits for the model, or for the environment's own code."""

    GENERATING = "generating"
    SCORING = "scoring"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """Rollouts by the stage of their group."""

    num_generating: int
    num_scoring: int
    scoring_for_s: float
    """Age in seconds of the oldest group that is being scored."""


class StageBoard:
    """The groups that run now, each with its stage and the time it entered it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[object, tuple[Stage, int, float]] = {}

    @contextmanager
    def stage(self, stage: Stage, *, num_rollouts: int) -> Iterator[None]:
        """Count `num_rollouts` rollouts in `stage` for as long as the block runs."""
        key = object()
        self._entries[key] = (stage, num_rollouts, self._clock())
        try:
            yield
        finally:
            del self._entries[key]

    def counts(self) -> StageCounts:
        """Return the counts of now. May be called from another thread."""
        entries = list(self._entries.values())
        scoring = [(count, since) for stage, count, since in entries if stage is Stage.SCORING]
        return StageCounts(
            num_generating=sum(count for stage, count, _ in entries if stage is Stage.GENERATING),
            num_scoring=sum(count for count, _ in scoring),
            scoring_for_s=self._clock() - min((since for _, since in scoring), default=self._clock()),
        )
