"""Checks each role's attempts: a start, events in the order of its clock, and a stop unless it was killed.

Fed with every event. Knows nothing of what the events mean beyond that.
"""

from dataclasses import dataclass

from trivet.history.breaches import Invariant, Ledger
from trivet.wire.events import AnyEvent, Start, Stop

LAUNCHER = "launcher"
"""Writes between the attempts of others, and has no start of its own."""
_ORDERLY = ("done", "preempted", "exhausted")
"""Reasons of a stop before which the role has finished everything that it began."""
_RECORD, _ONCE = Invariant.INTACT_RECORD, Invariant.EXACTLY_ONCE


@dataclass(slots=True, kw_only=True)
class _Life:
    attempt: int
    last: AnyEvent
    has_stopped: bool = False


class RoleHistory:
    """Holds the last event of each role."""

    def __init__(self, ledger: Ledger, *, does_count_attempts: bool) -> None:
        """Start before the first event.

        Args:
            does_count_attempts: a launcher started the roles, and counted; roles started by hand may all say attempt 1.
        """
        self._ledger, self._require = ledger, ledger.require
        self._does_count_attempts = does_count_attempts
        self._lives: dict[str, _Life] = {}
        self.starts_after_cut: dict[str, list[int]] = {}
        """Steps by role, of starts that found the attempt before without an orderly stop."""
        self._clock_steps: dict[str, tuple[int, float, int | None]] = {}
        """Number, greatest seconds and first line of the times that a role's clock went back."""

    @property
    def last_attempt(self) -> int:
        """The highest attempt of any role."""
        return max((life.attempt for life in self._lives.values()), default=0)

    def read(self, event: AnyEvent) -> None:
        """Check the event's attempt, time and place between start and stop."""
        life = self._lives.get(event.role)
        if isinstance(event, Start) or (life is None and event.role == LAUNCHER):
            self._begin(event, life)
            return
        if life is None:
            self._require(False, _RECORD, f"the {event.role} writes before its start: the start was removed or moved")
            self._lives[event.role] = _Life(attempt=event.attempt, last=event)
            return
        self._ledger.checks += 3
        if life.has_stopped:
            self._ledger.breach(_ONCE, f"the {event.role} writes after its stop")
        if event.attempt != life.attempt and not (event.role == LAUNCHER and event.attempt > life.attempt):
            self._ledger.breach(_RECORD, f"the {event.role} started as attempt {life.attempt} and writes as {event.attempt}")
        if event.time <= life.last.time:
            self._compare_times(event, life.last)
        life.last, life.attempt = event, event.attempt
        life.has_stopped = isinstance(event, Stop)

    def is_cut_short(self, role: str) -> bool:
        """Return whether the role's last attempt has no orderly stop: it runs, was killed, or failed."""
        life = self._lives.get(role)
        return life is None or not (isinstance(life.last, Stop) and life.last.reason in _ORDERLY)

    def has_stopped(self, role: str) -> bool:
        """Return whether the role's last event is a stop."""
        life = self._lives.get(role)
        return life is not None and life.has_stopped

    def attempt_of(self, role: str) -> int | None:
        """Return the role's last attempt, None before its first event."""
        life = self._lives.get(role)
        return life.attempt if life is not None else None

    def report_clocks(self) -> None:
        """Put what is unusual about the clocks into the ledger."""
        for role, (count, seconds, line) in self._clock_steps.items():
            times = "once" if count == 1 else f"{count} times"
            self._ledger.remarks.append(
                f"the clock of the {role} went back {times}, by {seconds:.6g} s at most, first at line {line}"
            )

    def _begin(self, event: AnyEvent, life: _Life | None) -> None:
        if life is not None:
            is_later = event.attempt > life.attempt or (not self._does_count_attempts and event.attempt == life.attempt)
            self._require(is_later, _RECORD, f"the {event.role} starts as attempt {event.attempt} after attempt {life.attempt}")
            self._require(event != life.last, _RECORD, f"the start of the {event.role} is there twice")
            if isinstance(event, Start) and self.is_cut_short(event.role):
                self.starts_after_cut.setdefault(event.role, []).append(event.from_step)
        self._lives[event.role] = _Life(attempt=event.attempt, last=event)

    def _compare_times(self, event: AnyEvent, last: AnyEvent) -> None:
        if event == last:
            self._ledger.breach(_RECORD, "this line repeats the line before of the same role, to the same moment")
        elif event.time < last.time:
            count, seconds, line = self._clock_steps.get(event.role, (0, 0.0, self._ledger.line))
            self._clock_steps[event.role] = (count + 1, max(seconds, last.time - event.time), line)
