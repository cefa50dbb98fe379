"""Watches the roles of a run: decides when it is over and why, ends what is left, and says what happened.

Consumes the roles' exits, logs and events. Produces the exit code. `decide` is pure; `supervise` carries it out.
"""

import http.client
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType, TracebackType
from urllib.parse import urlsplit

from trivet.launcher import processes
from trivet.launcher.logs import LogFollower, RunLog, is_for_terminal, last_lines
from trivet.launcher.plan import INFERENCE, ProcessSpec
from trivet.launcher.processes import Child
from trivet.lifetime import adopt_orphans

TICK_S = 0.2
_READY_INTERVAL_S = 2.0
_PROBE_TIMEOUT_S = 1.0
_REPEATED_S = 1.0
"""One Ctrl-C may arrive twice, from the terminal and from `uv run`; a signal after this long is a second one: kill now."""
_PROPAGATED = frozenset({2, 3})
"""Exit codes of a role that the run ends with: bad configuration, diverged."""


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """What is known of a role at one moment. Times are of one monotonic clock."""

    name: str
    does_finish: bool
    exit_code: int | None = None
    ended_at: float = 0.0
    is_complete: bool = False
    """It recorded that it reached the last step."""
    last_output_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    outcome: Outcome
    exit_code: int
    role: str | None
    """The role that failed first."""
    reason: str


def decide(roles: Sequence[RoleState], *, interrupted_by: int | None, now: float, patience_s: float) -> Verdict | None:
    """Whether the run is over, and how; None while it goes on.

    Done: every role that finishes has ended with 0 after its last step; one may be later than the other, as long as it
    writes something every `patience_s`. Failed: any other exit, 0 included; the first one is the cause.
    """
    if interrupted_by is not None:
        name = signal.Signals(interrupted_by).name
        return Verdict(outcome=Outcome.INTERRUPTED, exit_code=128 + interrupted_by, role=None, reason=f"interrupted by {name}")
    finishing = [role for role in roles if role.does_finish]
    if all(_is_done(role) for role in finishing):
        return Verdict(outcome=Outcome.DONE, exit_code=0, role=None, reason="every step is done")
    failures = [role for role in roles if role.exit_code is not None and not _is_done(role)]
    if failures:
        first = min(failures, key=lambda role: role.ended_at)
        return _failure(first, f"{describe_exit(first.exit_code)}{' before its last step' if first.exit_code == 0 else ''}")
    waiting = [role for role in finishing if not _is_done(role)]
    if len(waiting) == len(finishing):
        return None
    since = max(role.ended_at for role in finishing if _is_done(role))
    for role in waiting:
        silent_s = now - max(since, role.last_output_at)
        if silent_s > patience_s:
            others = ", ".join(other.name for other in finishing if _is_done(other))
            return _failure(role, f"still running and silent for {silent_s:.0f} s after {others} finished")
    return None


def _is_done(role: RoleState) -> bool:
    return role.does_finish and role.exit_code == 0 and role.is_complete


def _failure(role: RoleState, reason: str) -> Verdict:
    code = role.exit_code if role.exit_code in _PROPAGATED else 1
    return Verdict(outcome=Outcome.FAILED, exit_code=code or 1, role=role.name, reason=reason)


def describe_exit(code: int | None) -> str:
    """`exit code 3`, `killed by SIGKILL`; a shell's 128 + N is named too."""
    if code is None:
        return "still running"
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with exit code {code}"
    return f"killed by {name}" if code < 0 else f"ended with exit code {code} ({name})"


def failure_report(verdict: Verdict, child: Child) -> str:
    """Role, exit code or signal, the last lines of its log and where the log is."""
    lines = last_lines(child.spec.log, offset=child.log_offset)
    quoted = "\n".join(f"  | {line}" for line in lines) if lines else "  (it wrote nothing)"
    return f"{verdict.role} failed: {verdict.reason}\nlast lines of {child.spec.log}:\n{quoted}\nfull log: {child.spec.log}"


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP as a value to look at; one that was ignored at the start (nohup) stays ignored.

    >>> with Interrupts(clock=time.monotonic) as interrupts:
    ...     interrupts.first
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._received: list[tuple[int, float]] = []
        self._previous: dict[signal.Signals, object] = {}

    @property
    def first(self) -> int | None:
        return self._received[0][0] if self._received else None

    def has_any_since(self, moment: float) -> bool:
        return any(time > moment for _, time in self._received)

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, self._clock()))


class _Watched:
    """A child with what the supervisor has seen of it."""

    def __init__(self, child: Child, *, now: float) -> None:
        self.child = child
        self.follower = LogFollower(child.spec.log, offset=child.log_offset)
        self.state = RoleState(name=child.spec.name, does_finish=child.spec.does_finish, last_output_at=now)

    def look(self, *, now: float, is_complete: Callable[[str], bool]) -> list[str]:
        """Bring `state` up to date; returns the lines that were added to the log."""
        code = self.child.exit_code
        lines = self.follower.read_lines()
        old = self.state
        has_ended = old.exit_code is None and code is not None
        self.state = RoleState(
            name=old.name,
            does_finish=old.does_finish,
            exit_code=code,
            ended_at=now if has_ended else old.ended_at,
            is_complete=is_complete(old.name) if has_ended and code == 0 else old.is_complete,
            last_output_at=now if lines else old.last_output_at,
        )
        return lines


def supervise(
    specs: Iterable[ProcessSpec],
    *,
    python: str,
    environ: Mapping[str, str],
    log: RunLog,
    is_complete: Callable[[str], bool],
    base_urls: Sequence[str],
    shutdown_timeout_s: float,
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Start the roles, watch them to the end, leave nothing behind; returns the exit code of the run.

    Args:
        is_complete: whether the named role, which ended with 0, reached its last step.
        base_urls: servers whose readiness is announced.
    """
    adopt_orphans()
    started = clock()
    watched: list[_Watched] = []
    with Interrupts(clock=clock) as interrupts:
        try:
            for spec in specs:
                child = processes.start(spec, python=python, environ=environ)
                watched.append(_Watched(child, now=clock()))
                log.say(f"started {spec.name} pid={child.pid} log={spec.log}")
            probe = _ReadyProbe(base_urls if any(item.child.spec.name == INFERENCE for item in watched) else (), log=log)
            while True:
                verdict = _tick(watched, interrupts, log=log, is_complete=is_complete, now=clock(), patience_s=patience_s)
                if verdict is not None:
                    break
                probe.look(now=clock(), started=started)
                sleep(TICK_S)
            _announce(verdict, watched, log=log, elapsed_s=clock() - started)
        finally:
            patient_until = clock() + _REPEATED_S
            killed = processes.stop(
                [item.child for item in watched],
                timeout_s=shutdown_timeout_s,
                is_hurried=lambda: interrupts.has_any_since(patient_until),
            )
            processes.end_orphans()
            for child in killed:
                log.say(f"{child.spec.name} did not end within {shutdown_timeout_s:g} s of SIGTERM and was killed")
    return verdict.exit_code


def _tick(
    watched: Sequence[_Watched],
    interrupts: Interrupts,
    *,
    log: RunLog,
    is_complete: Callable[[str], bool],
    now: float,
    patience_s: float,
) -> Verdict | None:
    for item in watched:
        lines = item.look(now=now, is_complete=is_complete)
        if item.state.does_finish:
            for line in filter(is_for_terminal, lines):
                log.show(line)
    return decide([item.state for item in watched], interrupted_by=interrupts.first, now=now, patience_s=patience_s)


def _announce(verdict: Verdict, watched: Sequence[_Watched], *, log: RunLog, elapsed_s: float) -> None:
    failed = next((item.child for item in watched if item.child.spec.name == verdict.role), None)
    if failed is not None:
        log.say(failure_report(verdict, failed))
    log.say(f"{verdict.outcome} after {elapsed_s:.0f} s: {verdict.reason}; stopping what still runs")


class _ReadyProbe:
    """Says once when each inference server has become ready."""

    def __init__(self, base_urls: Sequence[str], *, log: RunLog) -> None:
        self._waiting = list(base_urls)
        self._log = log
        self._next_at = 0.0

    def look(self, *, now: float, started: float) -> None:
        if not self._waiting or now < self._next_at:
            return
        self._next_at = now + _READY_INTERVAL_S
        for url in [url for url in self._waiting if answers(url)]:
            self._waiting.remove(url)
            self._log.say(f"inference ready url={url} after {now - started:.0f} s")


def answers(base_url: str) -> bool:
    """Whether GET /health of the server at `base_url` says 200."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
