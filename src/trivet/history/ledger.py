"""Counts the statements that the checker examined, and collects those that do not hold."""

from dataclasses import dataclass
from enum import IntEnum


class Invariant(IntEnum):
    """The invariants of a run, numbered as in docs/architecture.md."""

    EXACTLY_ONCE = 1
    VERSIONS_TELL_THE_TRUTH = 2
    ONE_COMMIT = 3
    READERS_ARE_SAFE = 4
    INTACT_RECORD = 0
    """Not one of the run's invariants: the files from which these are proven are as the run wrote them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One statement about the run that does not hold."""

    invariant: Invariant
    reason: str
    line: int | None = None
    """Line of events.jsonl, counted from 1; None for a contradiction between a file and the whole history."""


class Ledger:
    """Collects the findings about the event that is being read, and about the files."""

    def __init__(self) -> None:
        self.line: int | None = None
        """Line of the event that is being read; None while files are compared."""
        self.breaches: list[Breach] = []
        self.checks = 0
        """Number of statements that were examined."""
        self.remarks: list[str] = []
        """Observations that are unusual and break nothing."""
        self.not_examined: list[str] = []
        """Subjects that were not examined, each with the reason."""

    def require(self, holds: bool, invariant: Invariant, reason: str) -> bool:
        """Count a statement, record a breach unless it `holds`, and return `holds`."""
        self.checks += 1
        if not holds:
            self.breach(invariant, reason)
        return holds

    def breach(self, invariant: Invariant, reason: str) -> None:
        """Record a statement that does not hold and was counted already."""
        self.breaches.append(Breach(invariant=invariant, reason=reason, line=self.line))
