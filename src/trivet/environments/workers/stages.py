"""Which stage each running group is in, for whoever asks from another thread: a blocked event loop cannot answer itself."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    GENERATING = "generating"
    SCORING = "scoring"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    num_generating: int
    num_scoring: int
    scoring_for_s: float
    """Age of the oldest group that is being scored."""


class StageBoard:
    """
    >>> with board.stage(Stage.SCORING, num_rollouts=8):
    ...     await score()
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[object, tuple[Stage, int, float]] = {}

    @contextmanager
    def stage(self, stage: Stage, *, num_rollouts: int) -> Iterator[None]:
        key = object()
        self._entries[key] = (stage, num_rollouts, self._clock())
        try:
            yield
        finally:
            del self._entries[key]

    def counts(self) -> StageCounts:
        entries = list(self._entries.values())
        scoring = [(count, since) for stage, count, since in entries if stage is Stage.SCORING]
        return StageCounts(
            num_generating=sum(count for stage, count, _ in entries if stage is Stage.GENERATING),
            num_scoring=sum(count for count, _ in scoring),
            scoring_for_s=self._clock() - min((since for _, since in scoring), default=self._clock()),
        )
