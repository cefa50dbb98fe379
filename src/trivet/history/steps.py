"""Checks invariants 1 and 3 on the trainer's side: steps are trained once, on the batch formed for them; commits and starts.

Fed with the trainer's events, and with the batches that the orchestrator formed.
"""

from collections.abc import Sequence

from trivet.history.breaches import Invariant, Ledger
from trivet.wire.events import Commit, Start, Train
from trivet.wire.versions import Step

_ONCE, _COMMIT = Invariant.EXACTLY_ONCE, Invariant.ONE_COMMIT


class StepHistory:
    """Holds the trainer's last step and its commits."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.last_step = Step(0)
        self.from_step = Step(0)
        self.commits: dict[int, str] = {}
        """Digest of its record by step, empty where the history has none."""
        self.recent: set[int] = set()
        """Steps committed since the trainer started, and the one that it started from."""
        self.fingerprints: dict[int, int] = {}
        """`fingerprint` of each trained step's groups."""
        self.has_started = False
        self.has_stopped = True
        """False while an attempt runs, and for ever when it was killed: then it may have committed without saying so."""
        self.voided = 0
        """Steps that resumes took back."""

    def start(self, event: Start) -> None:
        """Check that an attempt starts from a committed step."""
        if self.has_started and event.from_step:
            self._ledger.require(
                event.from_step in self.commits or self.may_have_committed(event.from_step),
                _COMMIT,
                f"starts from step {event.from_step}, which was not committed; commits: {sorted(self.commits) or 'none'}",
            )
        elif self.has_started:
            self._ledger.require(
                not self.commits, _COMMIT, f"starts anew, although step {max(self.commits, default=0)} is committed"
            )
        self.voided += max(self.last_step - event.from_step, 0)
        self.commits = {step: digest for step, digest in self.commits.items() if step <= event.from_step}
        self.recent = {event.from_step} if event.from_step else set()
        if event.from_step:
            self.commits.setdefault(event.from_step, "")
        self.fingerprints = {step: value for step, value in self.fingerprints.items() if step <= event.from_step}
        self.last_step = self.from_step = event.from_step
        self.has_started, self.has_stopped = True, False

    def may_have_committed(self, step: int) -> bool:
        """Return whether a commit of `step` may be real without an event: it is written just before the event is."""
        return not self.has_stopped and self.from_step < step <= self.last_step

    def train(self, event: Train, *, formed: Sequence[int] | None) -> None:
        """Check that the step is the next, and trains what its batch was formed of."""
        self._ledger.require(
            event.step == self.last_step + 1, _ONCE, f"step {event.step} is trained, but {self.last_step + 1} is the next"
        )
        if self._ledger.require(formed is not None, _ONCE, f"step {event.step} is trained before its batch was formed"):
            self._ledger.require(
                formed == event.group_ids,
                _ONCE,
                f"step {event.step} trained groups {_few(event.group_ids)}; its batch was formed of {_few(formed or ())}",
            )
        self.last_step = event.step
        self.fingerprints[event.step] = fingerprint(event.group_ids)

    def reach(self, step: int) -> None:
        """Supervised fine-tuning says which step it has reached by publishing it."""
        self.last_step = Step(max(self.last_step, step))

    def commit(self, event: Commit) -> None:
        """Check that a trained step is committed once."""
        self._ledger.require(event.step not in self.commits, _COMMIT, f"step {event.step} is committed twice")
        self._ledger.require(
            event.step <= self.last_step,
            _COMMIT,
            f"step {event.step} is committed; the last that was trained is {self.last_step}",
        )
        self.commits[event.step] = event.digest
        self.recent.add(event.step)


def fingerprint(group_ids: Sequence[int]) -> int:
    """Tells the groups of one batch from any others, in less memory."""
    return hash(tuple(sorted(group_ids)))


def _few(group_ids: Sequence[int]) -> str:
    shown = ", ".join(str(group_id) for group_id in group_ids[:8])
    return f"[{shown}{', …' if len(group_ids) > 8 else ''}]"
