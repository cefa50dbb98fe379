"""Checks that events.jsonl holds every line as it was written, from what each line says of its place (`telemetry.events`).

Each role's lines are a chain: a line that was changed, removed, repeated or moved breaks it at the next one. Each line says how
long the file was when it was written: a line that stands earlier has lost something before it, whoever wrote that. It does not
find lines that are missing at the end of the file; other files tell of those.
"""

from trivet.history.breaches import Invariant, Ledger
from trivet.telemetry.events import ChainLink, chain_value, mac_value, take_apart

_RECORD = Invariant.INTACT_RECORD


class ChainHistory:
    """Follows the chain of each role's lines."""

    def __init__(self, ledger: Ledger, *, key: bytes | None = None, must_be_signed: bool = False) -> None:
        """Start before the first line.

        Args:
            key: verifies signatures; None: they are not looked at.
            must_be_signed: the configuration of the run's last attempt asks for signatures.
        """
        self._ledger = ledger
        self._key = key
        self._must_be_signed = must_be_signed
        self._last: dict[str, ChainLink] = {}
        self.num_unsealed = 0
        """Lines that carry no chain: of versions that wrote none."""
        self.num_signed = 0
        self.num_unsigned = 0

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
        last = last or ChainLink()
        ledger.checks += 1
        if parts.link.chain != chain_value(parts.content, last):
            ledger.breach(
                _RECORD, f"the chain of the {role} breaks: this line, or one before it, was changed, removed or moved"
            )
        if place + parts.start < parts.offset:
            ledger.breach(
                _RECORD,
                f"the line was written at byte {parts.offset} or later and stands at byte {place + parts.start}: "
                "something before it was removed or moved",
            )
        if parts.signed:
            self.num_signed += 1
            if self._key is not None:
                ledger.checks += 1
                if parts.link.mac != mac_value(parts.signed, last, key=self._key):
                    ledger.breach(_RECORD, f"the signature of the {role} does not hold: what it signs was changed")
        else:
            self.num_unsigned += 1
            if last.mac and not text.startswith(b'{"event":"start"'):
                ledger.breach(_RECORD, f"the line carries no signature, and the line before of the {role} does")
        self._last[role] = parts.link

    def report_not_examined(self) -> None:
        """Put what was not looked at into the ledger."""
        self._ledger.line = None
        if self.num_unsealed:
            self._ledger.not_examined.append(
                f"the chain of {self.num_unsealed:,} lines: they carry none, as those of older versions"
            )
        if self.num_signed and self._key is None:
            self._ledger.not_examined.append(f"the signatures of {self.num_signed:,} lines: the run's secret is not at hand")
        if self._must_be_signed:
            self._ledger.require(
                bool(self.num_signed), _RECORD, "the configuration says events.sign = true, and no line is signed"
            )
        if not self.num_signed:
            self._ledger.not_examined.append("edits that recompute the chain: the events are not signed (events.sign = true)")
        elif self.num_unsigned:
            self._ledger.not_examined.append(f"the signatures of {self.num_unsigned:,} lines: they carry none")
