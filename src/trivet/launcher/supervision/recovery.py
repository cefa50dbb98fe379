"""Decides what happens to a run: goes on, restarts a part of it, or is over, and why. Pure: states and a time in, actions out.

A unit is what is restarted together: a server alone; orchestrator and trainer. Its phases:

    running --a role failed--> stopping --all have ended--> backing off --delay--> running
       |                           (killed at the deadline)
       +--the failure is final--> the run is over

SIGTERM, and SIGHUP of a closed terminal, ask for a commit first: the roles finish their step, commit and end, within
`preemption_grace_s`. Before the servers have answered for the first time there is no step, and nothing is waited for.
"""

import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from trivet.backoff import backoff_s
from trivet.config.schema.deployment import DeploymentConfig, RecoveryConfig
from trivet.errors import NodesMissing
from trivet.exits import NODE_LOST, describe_exit
from trivet.launcher.plan import TRAINING, RecoveryUnit
from trivet.launcher.supervision.decisions import (
    AnnounceRestart,
    FinishRun,
    Outcome,
    PreemptRun,
    RecoveryAction,
    RecoveryVerdict,
    RoleObservation,
    RunObservation,
    StartUnit,
    StopRoles,
)

MAX_BACKOFF_S = 60.0
"""A longer wait would cost more than the restarts that it saves."""
_FINAL = frozenset({2, 3})
"""Exit codes of a role that the run ends with: bad configuration, diverged. A restart would meet the same."""
_RETRIED = NodesMissing.exit_code
"""Exit code of a role that may succeed later: it waited in vain for a lock that a file system keeps for a machine that died."""
_COMMITTING = frozenset({signal.SIGTERM, signal.SIGHUP})
_REPORTS_LATE_S = 3.0
"""A finished step is known this much later at most: its process reports once a second, and reports are read once a second."""
_ONE_NODE = DeploymentConfig()


class Phase(StrEnum):
    """State of a unit, as in the diagram above."""

    RUNNING = "running"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"


@dataclass(slots=True)
class _UnitState:
    phase: Phase = Phase.RUNNING
    deadline: float = 0.0
    """Time at which what is left of a stopping unit is killed."""
    due: float = 0.0
    """Time at which it is started again."""
    restarted_at: list[float] = field(default_factory=list[float])
    missing_since: float | None = None
    """Time since which a node that the unit needs is lost; None while all are there."""
    failure_without_progress: str = ""
    """Signature of its last failure, if that was before any progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interruption:
    number: int
    """The signal."""
    exit_code: int
    """That of the run when it has ended for it."""
    reason: str


class Recovery:
    """The decisions about one run, and what they depend on: when each unit failed, and how often."""

    def __init__(
        self,
        config: RecoveryConfig,
        *,
        stop_timeout_s: float,
        patience_s: float,
        deployment: DeploymentConfig = _ONE_NODE,
    ) -> None:
        """Begin with every unit running.

        Args:
            stop_timeout_s: between the request to stop and the kill.
            patience_s: how long a role may write nothing after the other has finished.
            deployment: which nodes the run can do without, and for how long.
        """
        self._config = config
        self._deployment = deployment
        self._stop_timeout_s = stop_timeout_s
        self._patience_s = patience_s
        self._units: dict[RecoveryUnit, _UnitState] = {}
        self._interruption: _Interruption | None = None
        """Reason why the run is stopping."""
        self._interrupted_at: float | None = None
        self._commit_deadline: float | None = None

    def phase_of(self, unit: RecoveryUnit) -> Phase:
        """Return the phase of `unit`."""
        return self._state_of(unit).phase

    def is_running(self, unit: RecoveryUnit) -> bool:
        """Return whether `unit` is neither stopping nor waiting for its restart."""
        return self.phase_of(unit) is Phase.RUNNING

    def _state_of(self, unit: RecoveryUnit) -> _UnitState:
        return self._units.setdefault(unit, _UnitState())

    @property
    def is_preempted(self) -> bool:
        """True when the roles were asked to commit and to end."""
        return self._commit_deadline is not None

    def decide(self, run: RunObservation) -> list[RecoveryAction]:
        """Return what to do now. It is called in every round of the supervisor; an action is returned once."""
        finishing = [role for role in run.roles.values() if role.does_finish]
        if all(self._is_done(role, run) for role in finishing):
            return [_finish(Outcome.DONE, 0, "every step is done")]
        self._interruption = self._find_interruption(run) or self._interruption
        if self._interruption is not None:
            return list(self._preempt(run, self._interruption))
        if silent := self._silent_last(finishing, run):
            return [silent]
        actions: list[RecoveryAction] = []
        for unit, roles in _by_unit(run).items():
            state = self._state_of(unit)
            if state.phase is Phase.RUNNING:
                actions += self._watch(unit, state, roles, run)
            elif state.phase is Phase.STOPPING:
                actions += self._await_stop(state, roles, run)
            elif run.now >= state.due and self._are_gpus_settled(roles, run):
                actions += self._start_on_nodes(unit, state, roles, run)
        verdict = next((action for action in actions if isinstance(action, FinishRun)), None)
        return actions if verdict is None else [verdict]

    def _watch(
        self, unit: RecoveryUnit, state: _UnitState, roles: Sequence[RoleObservation], run: RunObservation
    ) -> Iterator[RecoveryAction]:
        failed = [role for role in roles if role.exit_code is not None and not self._is_done(role, run)]
        failed = failed or [role for role in roles if self._is_stuck(role) and not self._is_done(role, run)]
        if not failed:
            return
        first = min(failed, key=lambda role: role.ended_at if role.exit_code is not None else run.now)
        cause = _cause(first)
        final = self._why_final(state, first, run)
        if final is not None:
            yield _finish(Outcome.FAILED, _exit_code(first), f"{cause}{final}", role=first.name)
            return
        recent = self._recent_restarts(state, run.now)
        delay_s = backoff_s(len(recent) + 1, first_s=self._config.backoff_s, max_s=MAX_BACKOFF_S)
        if not _is_loss_alone(first, run):
            state.failure_without_progress = "" if first.has_progressed else _signature(first)
            state.restarted_at = [*recent, run.now]
        state.phase, state.deadline, state.due = Phase.STOPPING, run.now + self._stop_timeout_s, run.now + delay_s
        names = tuple(sorted(role.name for role in roles))
        yield AnnounceRestart(unit=unit, roles=names, role=first.name, cause=f"{first.name} {cause}", delay_s=delay_s)
        running = [role for role in roles if role.exit_code is None]
        for by_kill in (False, True):
            # A role that hangs would not react to SIGTERM.
            if names := tuple(role.name for role in running if bool(role.stuck) is by_kill):
                yield StopRoles(roles=names, by_kill=by_kill)

    def _are_gpus_settled(self, roles: Sequence[RoleObservation], run: RunObservation) -> bool:
        """Return whether no other role takes or frees memory on the GPUs of `roles`, which are to be started.

        A starting vLLM counts memory that others take as its own, and it fails when others free some.
        """
        names = {role.name for role in roles}
        servers = {server for role in roles for server in role.starts_after}
        for other in run.roles.values():
            has_ended = other.exit_code is not None
            if other.name in servers and (has_ended or not (self.is_running(other.unit) and other.has_progressed)):
                return False
            is_after = not has_ended and not names.isdisjoint(other.starts_after)
            if is_after and not (other.has_progressed if other.unit != TRAINING else other.is_waiting):
                return False
        return True

    def _start_on_nodes(
        self, unit: RecoveryUnit, state: _UnitState, roles: Sequence[RoleObservation], run: RunObservation
    ) -> Iterator[RecoveryAction]:
        """Start a unit again once its nodes are there, or enough of them, or end the run that waits for one in vain."""
        missing = {role.node for role in roles} & run.lost_nodes
        if not missing or (unit == TRAINING and self._can_train_without(missing, run.lost_nodes)):
            state.phase, state.missing_since = Phase.RUNNING, None
            yield StartUnit(unit=unit)
            return
        works = {role.work for role in roles if role.work}
        others = [role for role in run.roles.values() if role.unit != unit and role.node not in run.lost_nodes]
        if unit != TRAINING and any(role.work in works for role in others):
            state.missing_since = None
            return
        if state.missing_since is None:
            state.missing_since = run.now
        if run.now - state.missing_since >= self._deployment.return_timeout_s:
            nodes = ", ".join(map(str, sorted(missing)))
            reason = (
                f"node {nodes} was lost and did not return within {self._deployment.return_timeout_s:g} s "
                "(deployment.return_timeout_s)"
            )
            yield _finish(Outcome.FAILED, NodesMissing.exit_code, reason, role=roles[0].name)

    def _can_train_without(self, missing: Collection[int], lost: Collection[int]) -> bool:
        """Return whether the nodes of a unit that are lost hold ranks alone, and enough ranks remain."""
        needed, num_nodes = self._deployment.min_train_nodes, self._deployment.num_train_nodes
        remaining = num_nodes - sum(node < num_nodes for node in lost)
        return needed is not None and all(node < num_nodes for node in missing) and remaining >= needed

    def _why_final(self, state: _UnitState, role: RoleObservation, run: RunObservation) -> str | None:
        """Return why there is no restart, as the end of a sentence; None when there is one."""
        config = self._config
        if role.exit_code in _FINAL or config.max_restarts == 0:
            return ""
        if run.is_last_step_committed and role.does_finish:
            return " after the last step was committed"
        if role.exit_code is None and config.on_stuck == "stop":
            return ' (recovery.on_stuck = "stop")'
        if _is_loss_alone(role, run):
            return None
        if not role.has_progressed and role.exit_code != _RETRIED:
            what = "before it answered" if role.unit != TRAINING else "before the first step"
            is_first = not state.restarted_at and role.exit_code is not None and not _is_signal(role.exit_code)
            # Over several nodes this may be how the loss of one shows on the others.
            if is_first and not (role.unit == TRAINING and self._deployment.num_train_nodes > 1):
                return f", {what}: a restart would meet the same"
            if state.failure_without_progress == _signature(role) and role.exit_code != NODE_LOST:
                return f", again {what} and in the same way: a further restart would meet the same"
        if len(self._recent_restarts(state, run.now)) >= config.max_restarts:
            return (
                f", after {config.max_restarts} restarts within {config.restart_window_s:g} s "
                "(recovery.max_restarts, recovery.restart_window_s)"
            )
        return None

    def _recent_restarts(self, state: _UnitState, now: float) -> list[float]:
        return [at for at in state.restarted_at if now - at <= self._config.restart_window_s]

    def _await_stop(self, state: _UnitState, roles: Sequence[RoleObservation], run: RunObservation) -> Iterator[RecoveryAction]:
        for role in roles:
            if role.exit_code in _FINAL:
                yield _finish(Outcome.FAILED, _exit_code(role), describe_exit(role.exit_code), role=role.name)
                return
        running = tuple(role.name for role in roles if role.exit_code is None)
        if not running:
            state.phase = Phase.BACKING_OFF
        elif run.now >= state.deadline:
            state.deadline = run.now + self._stop_timeout_s
            yield StopRoles(roles=running, by_kill=True)

    def _find_interruption(self, run: RunObservation) -> _Interruption | None:
        """Return what asks the run to end: a signal here, or one on a node that trains and that the run needs."""
        if run.interrupted_by is not None:
            return _Interruption(
                number=run.interrupted_by,
                exit_code=128 + run.interrupted_by,
                reason=f"interrupted by {signal.Signals(run.interrupted_by).name}",
            )
        training = {role.node for role in _by_unit(run).get(TRAINING, [])}
        leaving = sorted(training & run.leaving_nodes)
        if not leaving or self._can_train_without(leaving, run.lost_nodes | run.leaving_nodes):
            return None
        nodes = ", ".join(map(str, leaving))
        return _Interruption(
            number=signal.SIGTERM, exit_code=NodesMissing.exit_code, reason=f"a signal has asked node {nodes} to end"
        )

    def _preempt(self, run: RunObservation, interruption: _Interruption) -> Iterator[RecoveryAction]:
        """Have the roles commit, wait for it, and end the run."""
        number = interruption.number
        training = _by_unit(run).get(TRAINING, [])
        if self._interrupted_at is None:
            self._interrupted_at = run.now
        if self._commit_deadline is None:
            is_in_time = run.now < self._interrupted_at + _REPORTS_LATE_S
            is_report_due = number in _COMMITTING and not run.is_repeated and is_in_time
            if is_report_due and _is_starting(run):
                return  # a step may be finished that nobody has reported yet
            end = self._why_no_commit(run, training, number)
            if end is None:
                self._commit_deadline = run.now + self._config.preemption_grace_s
                yield PreemptRun(reason=interruption.reason, grace_s=self._config.preemption_grace_s)
        else:
            end = self._why_wait_ends(run, training, self._commit_deadline)
        if end is not None:
            yield _finish(Outcome.INTERRUPTED, interruption.exit_code, f"{interruption.reason}{end}")

    def _why_no_commit(self, run: RunObservation, training: Sequence[RoleObservation], number: int) -> str | None:
        """Return why the run ends without a commit, as the end of a sentence; None when the roles can commit."""
        if _is_starting(run):
            return " during the start, with no step to commit"
        can_commit = (
            number in _COMMITTING
            and self._config.preemption_grace_s > 0
            and self.is_running(TRAINING)
            and all((role.exit_code is None or self._is_done(role, run)) and not role.stuck for role in training)
        )
        return None if can_commit else ""

    def _why_wait_ends(self, run: RunObservation, training: Sequence[RoleObservation], deadline: float) -> str | None:
        """Return why the commit is no longer waited for, as the end of a sentence; None while it is."""
        failed = [role for role in training if role.exit_code not in (None, 0)]
        if failed:
            return f", and {failed[0].name} {describe_exit(failed[0].exit_code)} before the commit"
        if all(role.exit_code == 0 for role in training):
            return ""
        if run.is_repeated:
            return ", twice: no wait for the commit"
        if run.now >= deadline:
            return f", and the step was not over within {self._config.preemption_grace_s:g} s (recovery.preemption_grace_s)"
        return None

    def _is_done(self, role: RoleObservation, run: RunObservation) -> bool:
        """Return whether the role finished, or all that it was there for is on disk when a signal ended it or it hangs."""
        if not role.does_finish:
            return False
        if role.exit_code == 0:
            return role.is_complete or run.is_last_step_committed
        if not run.is_last_step_committed:
            return False
        return _is_signal(role.exit_code) if role.exit_code is not None else self._is_stuck(role)

    def _is_stuck(self, role: RoleObservation) -> bool:
        return role.exit_code is None and bool(role.stuck) and self._config.on_stuck != "warn"

    def _silent_last(self, finishing: Sequence[RoleObservation], run: RunObservation) -> FinishRun | None:
        """Return the end of a run in which one role finished and the other writes nothing for `patience_s`; it may be later."""
        done = [role for role in finishing if self._is_done(role, run)]
        if not done or any(role.exit_code is not None for role in finishing if role not in done):
            return None
        since = max(role.ended_at for role in done)
        for role in finishing:
            silent_s = run.now - max(since, role.last_output_at)
            if role not in done and silent_s > self._patience_s:
                others = ", ".join(other.name for other in done)
                reason = f"still running and silent for {silent_s:.0f} s after {others} finished"
                return _finish(Outcome.FAILED, 1, reason, role=role.name)
        return None


def _by_unit(run: RunObservation) -> dict[RecoveryUnit, list[RoleObservation]]:
    units: dict[RecoveryUnit, list[RoleObservation]] = {}
    for role in run.roles.values():
        units.setdefault(role.unit, []).append(role)
    return units


def _is_starting(run: RunObservation) -> bool:
    """Return whether no step was finished and none is under way: a server is not up yet."""
    servers = [role for role in run.roles.values() if role.unit != TRAINING]
    training = _by_unit(run).get(TRAINING, [])
    return not all(role.has_progressed for role in servers) and not any(role.has_progressed for role in training)


def _is_loss_alone(role: RoleObservation, run: RunObservation) -> bool:
    """Return whether the role was lost with its node and that says nothing against the run: it worked, or others do its work.

    Among many nodes one is lost often, and it costs a restart, not the run.
    """
    if role.exit_code != NODE_LOST:
        return False
    others = (other for other in run.roles.values() if other.unit != role.unit and other.exit_code is None)
    return role.has_progressed or (role.unit != TRAINING and any(role.work and other.work == role.work for other in others))


def _is_signal(code: int) -> bool:
    """Return whether a process was ended from outside: by a signal, or with its node."""
    return code < 0 or code > 128


def _cause(role: RoleObservation) -> str:
    if role.exit_code is None:
        return f"stuck: {role.stuck}"
    return describe_exit(role.exit_code) + (" before its last step" if role.exit_code == 0 else "")


def _signature(role: RoleObservation) -> str:
    """Return what two failures have in common that count as the same."""
    if role.exit_code is None:
        return f"{role.name} stuck"
    if _is_signal(role.exit_code):
        return f"{role.name} {role.exit_code}"
    return f"{role.name} {role.exit_code} {role.last_log_line}"


def _exit_code(role: RoleObservation) -> int:
    return role.exit_code if role.exit_code is not None and role.exit_code in (*_FINAL, _RETRIED) else 1


def _finish(outcome: Outcome, exit_code: int, reason: str, *, role: str | None = None) -> FinishRun:
    return FinishRun(verdict=RecoveryVerdict(outcome=outcome, exit_code=exit_code, role=role, reason=reason))
