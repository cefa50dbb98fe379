"""Queues groups whose last try was lost with its server or worker, each until the time of its next try. Used by the dispatcher."""

from collections import deque
from dataclasses import dataclass

from trivet.backoff import backoff_s
from trivet.orchestrator.sampler import Draw

_MAX_TRIES = 5
"""Tries of a group. Their pauses add up to 7 s: more than the 5 s between two probes that notice the loss of a server."""
_RETRY_PAUSE_S = 1.0
"""Before the third try; doubles with each. The second follows at once, most likely on another server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRetry:
    """The next try of a group. The group is still in flight, and keeps its place among those that are."""

    draw: Draw
    number: int
    """Number of the try, from 1."""
    not_before: float
    """Time of the dispatcher's clock."""


class RetryQueue:
    """Keeps the order in which tries were lost; the pause before a try grows with its number."""

    def __init__(self) -> None:
        self._waiting = deque[GroupRetry]()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, draw: Draw, *, lost_tries: int, now: float) -> bool:
        """Queue the next try of `draw`; return False, and queue nothing, when the lost one was the last."""
        if lost_tries >= _MAX_TRIES:
            return False
        pause_s = backoff_s(lost_tries - 1, first_s=_RETRY_PAUSE_S) if lost_tries > 1 else 0.0
        self._waiting.append(GroupRetry(draw=draw, number=lost_tries + 1, not_before=now + pause_s))
        return True

    def is_due(self, now: float) -> bool:
        """Return whether the first group may be tried again."""
        return bool(self._waiting) and self._waiting[0].not_before <= now

    def wait_s(self, now: float, *, otherwise: float) -> float:
        """Return the seconds until the first group may be tried again; `otherwise` when none waits."""
        return self._waiting[0].not_before - now if self._waiting else otherwise

    def take(self) -> GroupRetry:
        """Remove and return the first group."""
        return self._waiting.popleft()
