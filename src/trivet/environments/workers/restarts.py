"""Whether a worker that ended is started again, and when. Pure."""

from dataclasses import dataclass

from trivet.backoff import backoff_s

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """Of one worker. Only restarts in a row count: a worker that finishes groups between two deaths is worth starting again.

    >>> budget = RestartBudget(limit=5)
    >>> budget.next_delay_s()
    0.5
    """

    limit: int
    """-1: none."""
    num_restarts: int = 0
    in_a_row: int = 0

    def finished_a_group(self) -> None:
        self.in_a_row = 0

    def next_delay_s(self) -> float | None:
        """Counts a restart and says how long to wait before it; None when the limit is reached."""
        if 0 <= self.limit <= self.in_a_row:
            return None
        delay = backoff_s(self.in_a_row + 1, first_s=_FIRST_DELAY_S, max_s=_LONGEST_DELAY_S)
        self.num_restarts += 1
        self.in_a_row += 1
        return delay
