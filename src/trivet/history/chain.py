"""Checks that events.jsonl holds every line as it was written, from what each line says of its place (`telemetry.events`).

Each role's lines are a chain: a line that was changed, removed, repeated or moved breaks it at the next one. Each line says how
long the file was when it was written: a line that stands earlier has lost something before it, whoever wrote that. It does not
find lines that are missing at the end of the file; other files tell of those.
"""

from trivet.history.breaches import Invariant, Ledger
from trivet.telemetry.events import chain_value, take_apart

_RECORD = Invariant.INTACT_RECORD


class ChainHistory:
    """Follows the chain of each role's lines."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last: dict[str, bytes] = {}
        self.num_unsealed = 0
        """Lines that carry no chain: of versions that wrote none."""

    def read(self, text: bytes, *, role: str, place: int) -> None:
        """Check one line against the last line of its role.

        Args:
            text: the line, with its end.
            place: where it begins in the file.
        """
        parts, last = take_apart(text), self._last.get(role)
        ledger = self._ledger
        ledger.checks += 1
        if parts is None:
            if last is not None:
                ledger.breach(_RECORD, f"the line carries no chain, and earlier lines of the {role} do")
            self.num_unsealed += 1
            return
        last = last or b""
        ledger.checks += 1
        if parts.chain != chain_value(parts.content, last):
            ledger.breach(
                _RECORD, f"the chain of the {role} breaks: this line, or one before it, was changed, removed or moved"
            )
        if place + parts.start < parts.offset:
            ledger.breach(
                _RECORD,
                f"the line was written at byte {parts.offset} or later and stands at byte {place + parts.start}: "
                "something before it was removed or moved",
            )
        self._last[role] = parts.chain

    def report_not_examined(self) -> None:
        """Put what was not looked at into the ledger."""
        self._ledger.line = None
        if self.num_unsealed:
            self._ledger.not_examined.append(
                f"the chain of {self.num_unsealed:,} lines: they carry none, as those of older versions"
            )
        self._ledger.not_examined.append("edits that recompute the chain")
