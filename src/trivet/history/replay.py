"""Reads events one after the other and hands each to the part of the checker that it concerns. No files, no clock.

The trainer's side of invariants 1 and 3 is here: steps are trained once, on the batch formed for them; commits and starts.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from trivet.checkpoints.orchestrator_part import OwedGroups
from trivet.history.breaches import Invariant, Ledger
from trivet.history.groups import GroupHistory
from trivet.history.policies import PolicyHistory
from trivet.history.record import Outline
from trivet.history.roles import RoleHistory
from trivet.wire.events import (
    AnyEvent,
    BatchFormed,
    Commit,
    Dispatch,
    Drop,
    Evaluate,
    Filter,
    Finish,
    Load,
    ProbeCompared,
    Publish,
    Retire,
    RolloutsWritten,
    ServerDown,
    ServerUp,
    Start,
    Stop,
    Train,
)
from trivet.wire.versions import Step

ORCHESTRATOR, TRAINER, SFT = "orchestrator", "trainer", "sft"


_ONCE, _COMMIT = Invariant.EXACTLY_ONCE, Invariant.ONE_COMMIT


class StepHistory:
    """Holds the trainer's last step and its commits."""

    def __init__(self, ledger: Ledger) -> None:
        self._require = ledger.require
        self.last_step = Step(0)
        self.from_step = Step(0)
        self.commits: dict[int, str] = {}
        """Digest of its record by step, empty where the history has none."""
        self.recent: set[int] = set()
        """Steps committed since the trainer started, and the one that it started from."""
        self.has_started = False
        self.has_stopped = True
        """False while an attempt runs, and for ever when it was killed: then it may have committed without saying so."""
        self.voided = 0
        """Steps that resumes took back."""

    def start(self, event: Start) -> None:
        """Check that an attempt starts from a committed step."""
        if self.has_started and event.from_step:
            self._require(
                event.from_step in self.commits or self.may_have_committed(event.from_step),
                _COMMIT,
                f"starts from step {event.from_step}, which was not committed; commits: {sorted(self.commits) or 'none'}",
            )
        elif self.has_started:
            self._require(not self.commits, _COMMIT, f"starts anew, although step {max(self.commits, default=0)} is committed")
        self.voided += max(self.last_step - event.from_step, 0)
        self.commits = {step: digest for step, digest in self.commits.items() if step <= event.from_step}
        self.recent = {event.from_step} if event.from_step else set()
        if event.from_step:
            self.commits.setdefault(event.from_step, "")
        self.last_step = self.from_step = event.from_step
        self.has_started, self.has_stopped = True, False

    def may_have_committed(self, step: int) -> bool:
        """Return whether a commit of `step` may be real without an event: it is written just before the event is."""
        return not self.has_stopped and self.from_step < step <= self.last_step

    def train(self, event: Train, *, formed: Sequence[int] | None) -> None:
        """Check that the step is the next, and trains what its batch was formed of."""
        self._require(
            event.step == self.last_step + 1, _ONCE, f"step {event.step} is trained, but {self.last_step + 1} is the next"
        )
        if self._require(formed is not None, _ONCE, f"step {event.step} is trained before its batch was formed"):
            self._require(
                formed == event.group_ids,
                _ONCE,
                f"step {event.step} trained groups {_few(event.group_ids)}; its batch was formed of {_few(formed or ())}",
            )
        self.last_step = event.step

    def reach(self, step: int) -> None:
        """Supervised fine-tuning says which step it has reached by publishing it."""
        self.last_step = Step(max(self.last_step, step))

    def commit(self, event: Commit) -> None:
        """Check that a trained step is committed once."""
        self._require(event.step not in self.commits, _COMMIT, f"step {event.step} is committed twice")
        self._require(
            event.step <= self.last_step,
            _COMMIT,
            f"step {event.step} is committed; the last that was trained is {self.last_step}",
        )
        self.commits[event.step] = event.digest
        self.recent.add(event.step)


def _few(group_ids: Sequence[int]) -> str:
    shown = ", ".join(str(group_id) for group_id in group_ids[:8])
    return f"[{shown}{', …' if len(group_ids) > 8 else ''}]"


class Replay:
    """Hands each event to the parts of the checker."""

    def __init__(
        self,
        outline: Outline,
        *,
        max_off_policy_steps: int,
        remembered: Collection[int] = (),
        with_rollouts: Collection[int] = (),
        inherited: OwedGroups | None = None,
    ) -> None:
        """Start before the first event.

        Args:
            remembered: steps, besides those of starts, whose owed groups will be asked for.
            with_rollouts: steps whose groups will be asked for.
            inherited: for a history that begins at another run's checkpoint: the groups in it; None if they are unknown.
        """
        self.ledger = Ledger()
        self.roles = RoleHistory(self.ledger, does_count_attempts=outline.does_count_attempts)
        self.groups = GroupHistory(
            self.ledger,
            max_off_policy_steps=max_off_policy_steps,
            remembered={*outline.start_steps, *remembered},
            with_rollouts=with_rollouts,
        )
        self.policies = PolicyHistory(self.ledger, first_step=outline.first_step)
        self.steps = StepHistory(self.ledger)
        self.starts: dict[str, int] = {}
        """Number of starts by role."""
        self.last_stop: Stop | None = None
        """The trainer's end, None while it runs."""
        self.run_id = ""
        self.first_step = outline.first_step
        """The `first_step` of the outline."""
        self.trainer_role = TRAINER
        """Role that trains: SFT in supervised fine-tuning."""
        self.num_events = 0
        self._outline = outline
        self._inherited = inherited
        self._from_step: dict[str, int] = {}
        self._orchestrator_handlers: dict[type, Callable[[Any], None]] = {
            Dispatch: self.groups.dispatch,
            Finish: lambda event: self.groups.finish(event, newest_published=self.policies.newest_published),
            Filter: self.groups.filter,
            Drop: self.groups.drop,
            BatchFormed: self.groups.batch,
            RolloutsWritten: self.groups.rollouts_written,
            Load: self.policies.load,
            Evaluate: self.policies.evaluate,
            ServerDown: self.policies.server_down,
            ServerUp: self.policies.server_up,
        }

    def read(self, event: AnyEvent, *, line: int) -> None:
        """Check the event at line `line` of events.jsonl."""
        self.ledger.line = line
        self.num_events += 1
        self.roles.read(event)
        if isinstance(event, Start):
            self._start(event)
        elif event.role == ORCHESTRATOR:
            if isinstance(event, Dispatch) and not self.groups.is_replay:
                self.policies.dispatch(event)
            if handle := self._orchestrator_handlers.get(type(event)):
                handle(event)
        elif event.role in (TRAINER, SFT):
            self._read_trainer(event)

    def _start(self, event: Start) -> None:
        self.ledger.require(
            self.run_id in ("", event.run_id),
            _ONCE,
            f"{event.role} of run {event.run_id!r} writes into the history of run {self.run_id!r}",
        )
        self.run_id = self.run_id or event.run_id
        self.starts[event.role] = self.starts.get(event.role, 0) + 1
        self._from_step[event.role] = event.from_step
        if event.role == ORCHESTRATOR:
            if self.starts[ORCHESTRATOR] == 1 and event.from_step and event.from_step == self.first_step:
                self.groups.adopt(event.from_step, self._inherited)
            self.groups.start(event.from_step, is_replay=bool(event.replayed_run))
            if event.replayed_run and self.starts[ORCHESTRATOR] == 1:
                self.ledger.not_examined.append(
                    f"policies of the replayed rollouts: run {event.replayed_run!r} sampled them, and its own history proves them"
                )
            self.policies.start_orchestrator()
        elif event.role in (TRAINER, SFT):
            self.trainer_role = event.role
            self.steps.start(event)
            self.policies.start_trainer(event.from_step)
            self.last_stop = None

    def _read_trainer(self, event: AnyEvent) -> None:
        match event:
            case Train():
                self._train(event)
            case Publish():
                if event.role == SFT:
                    self.steps.reach(event.version)
                self.policies.publish(event, last_step=self.steps.last_step)
            case ProbeCompared():
                self.policies.compare_probe(event)
            case Retire():
                self.policies.retire(event)
            case Commit():
                self.steps.commit(event)
            case Stop():
                self.steps.has_stopped = True
                self.last_stop = event
            case _:
                pass

    def _train(self, event: Train) -> None:
        formed = self.groups.take_batch(event.step) if self._outline.has_orchestrator else event.group_ids
        starts = self._from_step.get(ORCHESTRATOR), self._from_step.get(event.role)
        self.ledger.require(
            not self._outline.has_orchestrator or starts[0] == starts[1],
            _COMMIT,
            f"the trainer went back to step {starts[1]} and the orchestrator to step {starts[0]}",
        )
        self.steps.train(event, formed=formed)
