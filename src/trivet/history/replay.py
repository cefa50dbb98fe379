"""Reads events one after the other and hands each to the parts of the checker that it concerns. No files, no clock."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from trivet.checkpoints.orchestrator_part import OwedGroups
from trivet.history.breaches import Invariant, Ledger
from trivet.history.groups import GroupHistory
from trivet.history.policies import PolicyHistory
from trivet.history.roles import RoleHistory
from trivet.history.steps import StepHistory
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

ORCHESTRATOR, TRAINER, SFT = "orchestrator", "trainer", "sft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Facts about a history that must be known before it is read."""

    start_steps: frozenset[int]
    """Every step that an attempt started from."""
    has_orchestrator: bool
    """False for supervised fine-tuning and for batches that are fed again from disk."""
    first_step: int = 0
    """The step that the first attempt started from; above 0 for a fork of another run."""
    does_count_attempts: bool = False
    """A launcher started the roles: each start of a role is a later attempt."""


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
            self._read_orchestrator(event)
        elif event.role in (TRAINER, SFT):
            self._read_trainer(event)

    def _start(self, event: Start) -> None:
        self.ledger.require(
            self.run_id in ("", event.run_id),
            Invariant.EXACTLY_ONCE,
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

    def _read_orchestrator(self, event: AnyEvent) -> None:
        if isinstance(event, Dispatch) and not self.groups.is_replay:
            self.policies.dispatch(event)
        if handle := self._orchestrator_handlers.get(type(event)):
            handle(event)

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
            Invariant.ONE_COMMIT,
            f"the trainer went back to step {starts[1]} and the orchestrator to step {starts[0]}",
        )
        self.steps.train(event, formed=formed)
