"""Decides whether a run continues, restarts a part of itself, or ends.

`Recovery.decide` gets an observation and returns actions. It has no effect besides the state of the `Recovery`: the supervisor
carries the actions out.

A unit is a set of roles that are restarted together: orchestrator and trainer, or one server. Its states:

    running --a role failed--> stopping --all have ended--> backing off --delay--> running
       |                           (killed at the deadline)
       +--the failure is final--> the run is over

After SIGTERM, or SIGHUP of a closed terminal, the run is preempted: the roles finish their step, commit and end, within
`preemption_grace_s`. Before the servers have answered for the first time there is no step to finish, so the run ends at once.
"""

import signal
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from trivet.backoff import backoff_s
from trivet.config.schema.rl import RLConfig
from trivet.errors import NodesMissing
from trivet.exits import NODE_LOST, describe_exit
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.supervision.observer import RoleObservation, RunObservation
from trivet.wire.status import RoleState, RunState

MAX_BACKOFF_S = 60.0
"""Longest pause before a restart. A longer pause would cost more than the restarts that it saves."""
_FINAL_EXIT_CODES = frozenset({2, 3})
"""Exit codes of a role after which the run ends: bad configuration, diverged. A restarted role would fail in the same way."""
_RETRIED_EXIT_CODE = NodesMissing.exit_code
"""Exit code of a role that may succeed later: it waited too long for a lock that a file system keeps for a machine that died."""
_MAX_REPORT_DELAY_S = 3.0
"""Longest time until a finished step is known: its process reports once a second, and reports are read once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRoles:
    """End these roles, by SIGTERM or by SIGKILL."""

    roles: tuple[str, ...]
    by_kill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRestart:
    """Announce that a unit failed and will be restarted after `delay_s`."""

    unit: RecoveryUnit
    roles: tuple[str, ...]
    """The roles of the unit."""
    role: str
    """The role that failed first."""
    cause: str
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUnit:
    """Start a unit again. All of its roles have ended."""

    unit: RecoveryUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptRun:
    """Ask the roles to finish the step, commit a checkpoint and end."""

    reason: str
    grace_s: float
    """Longest time that this may take, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRun:
    """End the run: stop all roles that still run."""

    outcome: RunState
    """Done, failed or interrupted."""
    exit_code: int
    reason: str
    role: str | None = None
    """The role whose failure ended the run; None when no role failed."""


RecoveryAction = StopRoles | AnnounceRestart | StartUnit | PreemptRun | FinishRun


@dataclass(slots=True)
class _UnitState:
    state: RoleState = RoleState.RUNNING
    deadline: float = 0.0
    """Time at which the roles of a stopping unit that still run are killed."""
    due: float = 0.0
    """Time at which it is started again."""
    restarted_at: list[float] = field(default_factory=list[float])
    """Times of the failures for which it was restarted, within `recovery.restart_window_s`."""
    missing_since: float | None = None
    """Time since which a node that the unit needs is lost; None while all are there."""
    failure_without_progress: str = ""
    """Signature of its last failure, if the unit had not progressed before it; else empty."""


class Recovery:
    """Makes the decisions about one run, and remembers the failures of each unit on which they depend."""

    def __init__(self, config: RLConfig) -> None:
        """Begin with every unit running."""
        self._config = config.recovery
        self._deployment = config.deployment
        self._stop_timeout_s = config.shutdown_timeout_s
        self._patience_s = config.trainer.rollout_transport.timeout_s
        """Longest time without output of a role that still runs after the other has finished."""
        self._units: defaultdict[RecoveryUnit, _UnitState] = defaultdict(_UnitState)
        self._interruption: FinishRun | None = None
        """The end that a signal requested; None before a signal."""
        self._interrupted_at = 0.0
        self._commit_deadline: float | None = None
        """Time by which a preempted run must have committed; None while the run is not preempted."""

    def state_of(self, unit: RecoveryUnit) -> RoleState:
        """Return whether `unit` runs, stops, or waits for its restart."""
        return self._units[unit].state

    def is_running(self, unit: RecoveryUnit) -> bool:
        """Return whether `unit` is neither stopping nor waiting for its restart."""
        return self.state_of(unit) is RoleState.RUNNING

    @property
    def is_preempted(self) -> bool:
        """True once the roles have got the signal to commit and to end."""
        return self._commit_deadline is not None

    def decide(self, run: RunObservation) -> list[RecoveryAction]:
        """Return the actions to carry out now. Called in every round of the supervisor; each action is returned once."""
        finishing = [role for role in run.roles.values() if role.spec.does_finish]
        if all(self._is_done(role, run) for role in finishing):
            return [FinishRun(outcome=RunState.DONE, exit_code=0, reason="every step is done")]
        if interruption := self._find_interruption(run):
            if self._interruption is None:
                self._interrupted_at = run.now
            self._interruption = interruption
        if self._interruption is not None:
            return list(self._preempt(run, self._interruption))
        if end_by_silence := self._find_silent_role(finishing, run):
            return [end_by_silence]
        actions: list[RecoveryAction] = []
        for unit, roles in run.by_unit().items():
            state = self._units[unit]
            if state.state is RoleState.RUNNING:
                actions += self._watch(unit, state, roles, run)
            elif state.state is RoleState.STOPPING:
                actions += self._await_stop(state, roles, run)
            elif run.now >= state.due and self._are_gpus_settled(roles, run):
                actions += self._start_on_nodes(unit, state, roles, run)
        end = next((action for action in actions if isinstance(action, FinishRun)), None)
        return actions if end is None else [end]

    def _watch(
        self, unit: RecoveryUnit, state: _UnitState, roles: Sequence[RoleObservation], run: RunObservation
    ) -> Iterator[RecoveryAction]:
        """If a role of the unit failed, announce the unit's restart and stop its other roles; or end the run."""
        failed = [role for role in roles if role.exit_code is not None and not self._is_done(role, run)]
        failed = failed or [role for role in roles if self._is_stuck(role) and not self._is_done(role, run)]
        if not failed:
            yield from self._leave(unit, state, roles, run)
            return
        first = min(failed, key=lambda role: role.ended_at if role.exit_code is not None else run.now)
        if (final := self._why_final(state, first, run)) is not None:
            yield _fail(first, first.cause + final)
            return
        recent = self._recent_restarts(state, run.now)
        delay_s = backoff_s(len(recent) + 1, first_s=self._config.backoff_s, max_s=MAX_BACKOFF_S)
        if not _is_loss_alone(first, run):
            state.failure_without_progress = "" if first.has_progressed else first.signature
            state.restarted_at = [*recent, run.now]
        state.state, state.deadline, state.due = RoleState.STOPPING, run.now + self._stop_timeout_s, run.now + delay_s
        names = tuple(sorted(role.name for role in roles))
        yield AnnounceRestart(unit=unit, roles=names, role=first.name, cause=f"{first.name} {first.cause}", delay_s=delay_s)
        for by_kill in (False, True):  # a stuck role is killed: it would not react to SIGTERM
            if names := tuple(role.name for role in roles if role.exit_code is None and bool(role.stuck) is by_kill):
                yield StopRoles(roles=names, by_kill=by_kill)

    def _leave(
        self, unit: RecoveryUnit, state: _UnitState, roles: Sequence[RoleObservation], run: RunObservation
    ) -> Iterator[RecoveryAction]:
        """End a unit whose node was asked to end, if others do its work. Its roles finish theirs, and start again elsewhere."""
        gone = run.leaving_nodes | run.lost_nodes
        leaving = [role for role in roles if role.spec.node in run.leaving_nodes]
        if unit == TRAINING or not leaving or not self._have_others(unit, roles, run, without=gone):
            return
        state.state, state.due = RoleState.STOPPING, run.now
        state.deadline = run.now + max(self._config.preemption_grace_s, self._stop_timeout_s)
        names, cause = tuple(sorted(role.name for role in roles)), f"node {leaving[0].spec.node} is asked to end"
        yield AnnounceRestart(unit=unit, roles=names, role=leaving[0].name, cause=cause, delay_s=0.0)
        yield StopRoles(roles=names, by_kill=False)

    def _await_stop(self, state: _UnitState, roles: Sequence[RoleObservation], run: RunObservation) -> Iterator[RecoveryAction]:
        """Let a stopping unit back off once all roles have ended. At the deadline kill them; on a final exit code end the run."""
        for role in roles:
            if role.exit_code in _FINAL_EXIT_CODES:
                yield _fail(role, describe_exit(role.exit_code))
                return
        running = tuple(role.name for role in roles if role.exit_code is None)
        if not running:
            state.state = RoleState.BACKING_OFF
        elif run.now >= state.deadline:
            state.deadline = run.now + self._stop_timeout_s
            yield StopRoles(roles=running, by_kill=True)

    def _are_gpus_settled(self, roles: Sequence[RoleObservation], run: RunObservation) -> bool:
        """Return whether no other role takes or frees memory on the GPUs of `roles`, which are to be started.

        While vLLM starts, it counts memory that other processes take as its own, and it fails when they free memory.
        """
        names = {role.name for role in roles}
        servers = {server for role in roles for server in role.spec.starts_after}
        for other in run.roles.values():
            has_ended = other.exit_code is not None
            if other.name in servers and (has_ended or not (self.is_running(other.unit) and other.has_progressed)):
                return False
            is_after = not has_ended and not names.isdisjoint(other.spec.starts_after)
            if is_after and not (other.has_progressed if other.unit != TRAINING else other.is_waiting):
                return False
        return True

    def _start_on_nodes(
        self, unit: RecoveryUnit, state: _UnitState, roles: Sequence[RoleObservation], run: RunObservation
    ) -> Iterator[RecoveryAction]:
        """Start a unit again once its nodes are there, or enough of them. End the run when a node stays lost for too long."""
        missing = {role.spec.node for role in roles} & (run.lost_nodes | run.leaving_nodes)
        if not missing or (unit == TRAINING and self._can_train_without(missing, run.lost_nodes | run.leaving_nodes)):
            state.state, state.missing_since = RoleState.RUNNING, None
            yield StartUnit(unit=unit)
            return
        if unit != TRAINING and self._have_others(unit, roles, run, without=run.lost_nodes):
            state.missing_since = None
            return
        if state.missing_since is None:
            state.missing_since = run.now
        timeout_s = self._deployment.return_timeout_s
        if run.now - state.missing_since >= timeout_s:
            nodes = ", ".join(map(str, sorted(missing)))
            reason = f"node {nodes} was lost and did not return within {timeout_s:g} s (deployment.return_timeout_s)"
            yield FinishRun(outcome=RunState.FAILED, exit_code=NodesMissing.exit_code, reason=reason, role=roles[0].name)

    @staticmethod
    def _have_others(
        unit: RecoveryUnit, roles: Sequence[RoleObservation], run: RunObservation, *, without: Collection[int]
    ) -> bool:
        """Return whether another unit does the work of this one, on nodes that are not among `without`."""
        works = {role.spec.work for role in roles if role.spec.work}
        others = (role for role in run.roles.values() if role.unit != unit and role.spec.node not in without)
        return any(role.spec.work in works for role in others)

    def _can_train_without(self, missing: Collection[int], lost: Collection[int]) -> bool:
        """Return whether training can continue without `missing`: these nodes only had trainer ranks, and enough nodes remain.

        Args:
            missing: lost nodes of the training unit.
            lost: all lost nodes of the run.
        """
        needed, num_nodes = self._deployment.min_train_nodes, self._deployment.num_train_nodes
        remaining = num_nodes - sum(node < num_nodes for node in lost)
        return needed is not None and all(node < num_nodes for node in missing) and remaining >= needed

    def _why_final(self, state: _UnitState, role: RoleObservation, run: RunObservation) -> str | None:
        """Return why the unit is not restarted, as the end of a sentence that may be empty; None when it is restarted."""
        config = self._config
        if role.exit_code in _FINAL_EXIT_CODES or config.max_restarts == 0:
            return ""
        if run.is_last_step_committed and role.spec.does_finish:
            return " after the last step was committed"
        if role.exit_code is None and config.on_stuck == "stop":
            return ' (recovery.on_stuck = "stop")'
        if _is_loss_alone(role, run):
            return None
        if not role.has_progressed and role.exit_code != _RETRIED_EXIT_CODE:
            when = "before it answered" if role.unit != TRAINING else "before the first step"
            is_first = not state.restarted_at and role.exit_code is not None and not role.was_killed
            # With ranks on several nodes, a rank may also fail because another node was lost: that is worth a restart.
            if is_first and not (role.unit == TRAINING and self._deployment.num_train_nodes > 1):
                return f", {when}: a restart would meet the same"
            if state.failure_without_progress == role.signature and role.exit_code != NODE_LOST:
                return f", again {when} and in the same way: a further restart would meet the same"
        if len(self._recent_restarts(state, run.now)) >= config.max_restarts:
            return (
                f", after {config.max_restarts} restarts within {config.restart_window_s:g} s "
                "(recovery.max_restarts, recovery.restart_window_s)"
            )
        return None

    def _recent_restarts(self, state: _UnitState, now: float) -> list[float]:
        return [at for at in state.restarted_at if now - at <= self._config.restart_window_s]

    def _find_interruption(self, run: RunObservation) -> FinishRun | None:
        """Return the end that a signal asks for; None without one.

        The signal came to this launcher, or to that of another node with trainer ranks without which the run cannot train.
        """
        if (number := run.interrupted_by) is not None:
            reason = f"interrupted by {signal.Signals(number).name}"
            return FinishRun(outcome=RunState.INTERRUPTED, exit_code=128 + number, reason=reason)
        leaving = sorted({role.spec.node for role in run.by_unit().get(TRAINING, [])} & run.leaving_nodes)
        if not leaving or self._can_train_without(leaving, run.lost_nodes | run.leaving_nodes):
            return None
        reason = f"a signal has asked node {', '.join(map(str, leaving))} to end"
        return FinishRun(outcome=RunState.INTERRUPTED, exit_code=NodesMissing.exit_code, reason=reason)

    def _preempt(self, run: RunObservation, end: FinishRun) -> Iterator[RecoveryAction]:
        """Ask the roles to commit, wait until they have, and then end the run with `end`."""
        training, grace_s = run.by_unit().get(TRAINING, []), self._config.preemption_grace_s
        does_commit = end.exit_code != 128 + signal.SIGINT
        is_starting = not any(role.has_progressed for role in training) and not all(
            role.has_progressed for role in run.roles.values() if role.unit != TRAINING
        )
        why: str | None = ""
        """The reason why the run ends now, as the end of a sentence that may be empty; None while it waits for the commit."""
        if self._commit_deadline is not None:
            failed = [role for role in training if role.exit_code not in (None, 0)]
            if failed:
                why = f", and {failed[0].name} {describe_exit(failed[0].exit_code)} before the commit"
            elif not all(role.exit_code == 0 for role in training):
                why = None
                if run.is_repeated:
                    why = ", twice: no wait for the commit"
                elif run.now >= self._commit_deadline:
                    why = f", and the step was not over within {grace_s:g} s (recovery.preemption_grace_s)"
        elif is_starting:
            if does_commit and not run.is_repeated and run.now < self._interrupted_at + _MAX_REPORT_DELAY_S:
                return  # the first step may be finished and not reported yet
            why = " during the start, with no step to commit"
        elif (
            does_commit
            and grace_s > 0
            and self.is_running(TRAINING)
            and all((role.exit_code is None or self._is_done(role, run)) and not role.stuck for role in training)
        ):
            self._commit_deadline = run.now + grace_s
            yield PreemptRun(reason=end.reason, grace_s=grace_s)
            return
        if why is not None:
            yield FinishRun(outcome=end.outcome, exit_code=end.exit_code, reason=f"{end.reason}{why}")

    def _is_done(self, role: RoleObservation, run: RunObservation) -> bool:
        """Return whether the role has done its work: it ended after the last step, or it was killed or hangs after its commit."""
        if not role.spec.does_finish:
            return False
        if role.exit_code == 0:
            return role.is_complete or run.is_last_step_committed
        return run.is_last_step_committed and (role.was_killed or self._is_stuck(role))

    def _is_stuck(self, role: RoleObservation) -> bool:
        return role.exit_code is None and bool(role.stuck) and self._config.on_stuck != "warn"

    def _find_silent_role(self, finishing: Sequence[RoleObservation], run: RunObservation) -> FinishRun | None:
        """Return the end of a run in which one role finished and the other has written no output for `_patience_s`; else None."""
        done = [role for role in finishing if self._is_done(role, run)]
        unfinished = [role for role in finishing if role not in done]
        if not done or any(role.exit_code is not None for role in unfinished):
            return None
        done_at = max(role.ended_at for role in done)
        for role in unfinished:
            silent_s = run.now - max(done_at, role.last_output_at)
            if silent_s > self._patience_s:
                others = ", ".join(other.name for other in done)
                return _fail(role, f"still running and silent for {silent_s:.0f} s after {others} finished")
        return None


def _is_loss_alone(role: RoleObservation, run: RunObservation) -> bool:
    """Return whether the role was lost with its node, and nothing else is wrong: it had progressed, or another unit does its work.

    In a run over many nodes one is lost often. Such a loss costs a restart and must not end the run.
    """
    if role.exit_code != NODE_LOST:
        return False
    others = (other for other in run.roles.values() if other.unit != role.unit and other.exit_code is None)
    return role.has_progressed or (
        role.unit != TRAINING and any(role.spec.work and other.spec.work == role.spec.work for other in others)
    )


def _fail(role: RoleObservation, reason: str) -> FinishRun:
    """Return the end of a run that failed because of `role`. A final or retried exit code of the role becomes that of the run."""
    exit_code = (
        role.exit_code if role.exit_code is not None and role.exit_code in (*_FINAL_EXIT_CODES, _RETRIED_EXIT_CODE) else 1
    )
    return FinishRun(outcome=RunState.FAILED, exit_code=exit_code, reason=reason, role=role.name)
