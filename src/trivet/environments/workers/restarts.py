"""Decides whether and when a worker that ended is restarted. Pure."""

from dataclasses import dataclass

from trivet.backoff import backoff_s

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """The restarts of one worker. Only consecutive ones count: a worker that finishes groups in between is worth restarting."""

    limit: int
    """Consecutive restarts that are allowed; -1: no limit."""
    num_restarts: int = 0
    num_consecutive: int = 0
    """Restarts since the worker last finished a group."""

    def finished_a_group(self) -> None:
        """Forgive the restarts so far."""
        self.num_consecutive = 0

    def next_delay_s(self) -> float | None:
        """Count a restart and return how long to wait before it, in seconds; None when the limit is reached."""
        if 0 <= self.limit <= self.num_consecutive:
            return None
        delay = backoff_s(self.num_consecutive + 1, first_s=_FIRST_DELAY_S, max_s=_MAX_DELAY_S)
        self.num_restarts += 1
        self.num_consecutive += 1
        return delay
