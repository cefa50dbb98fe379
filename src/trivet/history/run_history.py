"""Follows a run's events in the order in which they were written, and checks invariants 1 to 4 (docs/architecture.md).

`history.check` and tests pass the events. Events of the trainer are compared with those of the orchestrator where they depend on
each other: a trained step with its batch, and the starts of both roles with the commits.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from trivet.checkpoints.orchestrator_part import PendingGroups
from trivet.history.groups import GroupHistory
from trivet.history.ledger import Invariant, Ledger
from trivet.history.policies import PolicyHistory
from trivet.history.record import Outline, RoleHistory
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


class RunHistory:
    """Passes each event to the part of the checker for it, and checks the trainer's steps and commits itself."""

    def __init__(
        self,
        outline: Outline,
        *,
        max_off_policy_steps: int,
        remembered: Collection[int] = (),
        with_rollouts: Collection[int] = (),
        inherited: PendingGroups | None = None,
    ) -> None:
        """Start before the first event.

        Args:
            remembered: steps, besides those of starts, whose pending groups must be kept.
            with_rollouts: steps whose rollouts are on disk, so that the groups of their batches must be kept.
            inherited: the groups in the other run's checkpoint, for a history that begins at one; None if they are unknown.
        """
        self.outline = outline
        self.ledger = Ledger()
        self.roles = RoleHistory(self.ledger, does_count_attempts=outline.does_count_attempts)
        self.groups = GroupHistory(
            self.ledger,
            max_off_policy_steps=max_off_policy_steps,
            remembered={*outline.start_steps, *remembered},
            with_rollouts=with_rollouts,
        )
        self.policies = PolicyHistory(self.ledger, first_step=outline.first_step)
        self._inherited = inherited
        self.run_id = ""
        self.num_events = 0
        self.starts: dict[str, int] = {}
        """Number of starts by role."""
        self._from_step: dict[str, Step] = {}
        """Step of the last start by role."""
        self.trainer_role = TRAINER
        """The role that trains: `SFT` in supervised fine-tuning."""
        self.last_step = Step(0)
        """The last step trained."""
        self.last_stop: Stop | None = None
        """The `stop` of the trainer's last attempt; None while it runs or when it was killed, in which case it may have
        committed a step without an event."""
        self.commits: dict[int, str] = {}
        """By committed step, the digest of its record; empty where the history has no digest."""
        self.recent_commits: set[int] = set()
        """Steps committed since the trainer started, and the one that it started from."""
        self.voided_steps = 0
        """Number of trained steps that resumes voided."""
        self._handlers: dict[tuple[bool, type], Callable[[Any], None]] = {
            (True, Dispatch): self._dispatch,
            (True, Finish): lambda event: self.groups.finish(event, newest_published=self.policies.newest_published),
            (True, Filter): self.groups.filter,
            (True, Drop): self.groups.drop,
            (True, BatchFormed): self.groups.batch,
            (True, RolloutsWritten): self.groups.rollouts_written,
            (True, Load): self.policies.load,
            (True, Evaluate): self.policies.evaluate,
            (True, ServerDown): self.policies.server_down,
            (True, ServerUp): self.policies.server_up,
            (False, Train): self._train,
            (False, Publish): self._publish,
            (False, ProbeCompared): self.policies.compare_probe,
            (False, Retire): self.policies.retire,
            (False, Commit): self._commit,
            (False, Stop): self._stop,
        }
        """The function for each kind of event: of the orchestrator (True), or of the role that trains (False)."""

    def read(self, event: AnyEvent, *, line: int) -> None:
        """Check the event at line `line` of events.jsonl."""
        self.ledger.line = line
        self.num_events += 1
        self.roles.read(event)
        if isinstance(event, Start):
            self._start(event)
        elif event.role in (ORCHESTRATOR, TRAINER, SFT):
            handle = self._handlers.get((event.role == ORCHESTRATOR, type(event)))
            if handle is not None:
                handle(event)

    def may_have_committed(self, step: int) -> bool:
        """Return whether `step` may be committed without an event: a killed trainer writes the commit before its event."""
        from_step = self._from_step.get(self.trainer_role)
        return from_step is not None and self.last_stop is None and from_step < step <= self.last_step

    def _start(self, event: Start) -> None:
        """Check the step from which a role starts, and void what its earlier attempts did after that step."""
        role, from_step, is_first = event.role, event.from_step, event.role not in self.starts
        self.ledger.require(
            self.run_id in ("", event.run_id),
            _ONCE,
            f"{role} of run {event.run_id!r} writes into the history of run {self.run_id!r}",
        )
        self.run_id = self.run_id or event.run_id
        self.starts[role] = self.starts.get(role, 0) + 1
        if role == ORCHESTRATOR:
            if is_first and from_step and from_step == self.outline.first_step:
                self.groups.adopt(from_step, self._inherited)
            self.groups.start(from_step, is_replay=bool(event.replayed_run))
            if event.replayed_run and is_first:
                self.ledger.not_examined.append(
                    f"policies of the replayed rollouts: run {event.replayed_run!r} sampled them, and its own history proves them"
                )
            self.policies.start_orchestrator()
        elif role in (TRAINER, SFT):
            self.trainer_role = role
            if not is_first and from_step:
                self.ledger.require(
                    from_step in self.commits or self.may_have_committed(from_step),
                    _COMMIT,
                    f"starts from step {from_step}, which was not committed; commits: {sorted(self.commits) or 'none'}",
                )
            elif not is_first:
                newest = max(self.commits, default=0)
                self.ledger.require(not newest, _COMMIT, f"starts anew, although step {newest} is committed")
            self.voided_steps += max(self.last_step - from_step, 0)
            self.commits = {step: digest for step, digest in self.commits.items() if step <= from_step}
            if from_step:
                self.commits.setdefault(from_step, "")
            self.recent_commits = {from_step} if from_step else set()
            self.last_step, self.last_stop = from_step, None
            self.policies.start_trainer(from_step)
        self._from_step[role] = from_step

    def _dispatch(self, event: Dispatch) -> None:
        if not self.groups.is_replay:
            self.policies.dispatch(event)
        self.groups.dispatch(event)

    def _train(self, event: Train) -> None:
        """Check that the step is the next, and that it trains the groups of its batch."""
        require, step = self.ledger.require, event.step
        formed = event.group_ids
        if self.outline.has_orchestrator:
            formed = self.groups.untrained.pop(step, None)
            starts = self._from_step.get(ORCHESTRATOR), self._from_step.get(event.role)
            message = f"the trainer went back to step {starts[1]} and the orchestrator to step {starts[0]}"
            require(starts[0] == starts[1], _COMMIT, message)
        require(step == self.last_step + 1, _ONCE, f"step {step} is trained, but {self.last_step + 1} is the next")
        if require(formed is not None, _ONCE, f"step {step} is trained before its batch was formed"):
            require(
                formed == event.group_ids,
                _ONCE,
                f"step {step} trained groups {_shorten(event.group_ids)}; its batch was formed of {_shorten(formed or ())}",
            )
        self.last_step = step

    def _publish(self, event: Publish) -> None:
        if event.role == SFT:  # it writes no `train` events, so a step is known to be trained when its policy is published
            self.last_step = Step(max(self.last_step, event.version))
        self.policies.publish(event, last_step=self.last_step)

    def _commit(self, event: Commit) -> None:
        """Check that a trained step is committed once."""
        step = event.step
        self.ledger.require(step not in self.commits, _COMMIT, f"step {step} is committed twice")
        is_trained = step <= self.last_step
        self.ledger.require(is_trained, _COMMIT, f"step {step} is committed; the last that was trained is {self.last_step}")
        self.commits[step] = event.digest
        self.recent_commits.add(step)

    def _stop(self, event: Stop) -> None:
        self.last_stop = event


def _shorten(group_ids: Sequence[int]) -> str:
    shown = ", ".join(str(group_id) for group_id in group_ids[:8])
    return f"[{shown}{', …' if len(group_ids) > 8 else ''}]"
