"""Follows the started roles: their exits, logs and reports, whether servers answer, and whether a unit has made progress."""

import http.client
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from trivet.launcher.host import HostedProcess
from trivet.launcher.logs import LogFollower, last_lines
from trivet.launcher.plan import ORCHESTRATOR, TRAINER, TRAINING, RecoveryUnit
from trivet.launcher.reports import RoleReports
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.decisions import RoleObservation
from trivet.wire.status import RUNNING_GROUPS

_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
_NUMBER = re.compile(r"\d+")
_POLL_INTERVAL_S = 2.0
"""A server that loads a model takes tens of seconds; more requests would find out nothing sooner."""
_ANSWER_TIMEOUT_S = 1.0
"""The supervisor waits for the answer. A server that takes longer is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Functions that tell and spend time. Tests pass a clock that they move themselves."""

    now: Callable[[], float] = time.monotonic
    """Monotonic seconds, for durations."""
    unix_time: Callable[[], float] = time.time
    """Seconds since 1970, for people."""
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()


class RoleProcess:
    """One started role."""

    def __init__(self, child: HostedProcess, *, now: float) -> None:
        self.child = child
        self.started_at = now
        self.reports = RoleReports()
        """Reports of its processes when the host was last asked."""
        self.stuck = ""
        """The reason why the watchdog treats it as stuck; empty when it does not."""
        self.stopped: tuple[int, ...] = ()
        """Pids of those of its processes that a signal has stopped."""
        self._follower = LogFollower(child.spec.log, offset=child.log_offset)
        self._exit_code: int | None = None
        self._ended_at = 0.0
        self._is_complete = False
        self._last_output_at = now
        self._last_log_line = ""

    @property
    def name(self) -> str:
        """Name of the role."""
        return self.child.spec.name

    @property
    def is_running(self) -> bool:
        """True when it ran at the last poll."""
        return self._exit_code is None

    def poll(self, *, now: float, is_complete: Callable[[str], bool]) -> list[str]:
        """Notice new output and the exit; returns the lines that were added to the log.

        Args:
            is_complete: whether the role of that name recorded that it reached the last step.
        """
        code = self.child.exit_code
        lines = self._follower.read_lines()
        if lines:
            self._last_output_at = now
        if self._exit_code is None and code is not None:
            self._exit_code, self._ended_at, self.stuck = code, now, ""
            self._is_complete = code == 0 and (not self.child.spec.records_end or is_complete(self.name))
            self._last_log_line = _normalize(last_lines(self.child.spec.log, offset=self.child.log_offset, count=1))
        return lines

    def last_step(self, *, attempt: int) -> int:
        """Return the newest step that it reported as finished in `attempt`, 0 for none."""
        return max((report.step for report in self.reports.readable if report.attempt == attempt), default=0)

    def observe(self, *, has_progressed: bool) -> RoleObservation:
        """Return what recovery has to know of it."""
        return RoleObservation(
            name=self.name,
            unit=self.child.spec.unit,
            node=self.child.spec.node,
            work=self.child.spec.work,
            does_finish=self.child.spec.does_finish,
            exit_code=self._exit_code,
            ended_at=self._ended_at,
            is_complete=self._is_complete,
            last_output_at=self._last_output_at,
            has_progressed=has_progressed,
            starts_after=self.child.spec.starts_after,
            is_waiting=any(report.waits_for == ORCHESTRATOR for report in self.reports.readable),
            stuck=self.stuck,
            last_log_line=self._last_log_line,
        )


def _normalize(lines: Sequence[str]) -> str:
    """Return the last of `lines` without what differs between two failures of one cause: the time, pids, seconds."""
    return _NUMBER.sub("#", _TIME.sub("", lines[-1])) if lines else ""


class ReadyProbe:
    """Names each server once when it has begun to answer, and once more after `restart`."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        self._waiting = list(base_urls)
        self._next_at = 0.0

    @property
    def are_all_ready(self) -> bool:
        """True when every server has answered since it was started."""
        return not self._waiting

    def restart(self, base_urls: Sequence[str]) -> None:
        """Note that the servers were started again, at these addresses."""
        self._waiting = list(base_urls)

    def poll(self, *, now: float) -> list[str]:
        """Ask those that have not answered yet; returns those that do now."""
        if not self._waiting or now < self._next_at:
            return []
        self._next_at = now + _POLL_INTERVAL_S
        ready = [url for url in self._waiting if answers(url)]
        self._waiting = [url for url in self._waiting if url not in ready]
        return ready


class UnitProgress:
    """Tells whether a unit has done something since its last start: its servers have answered, or a step was finished."""

    def __init__(self, attempts: Attempts, roles: Mapping[str, RoleProcess]) -> None:
        self._attempts = attempts
        self._roles = roles
        self._probes = {unit: ReadyProbe(urls) for unit, urls in attempts.server_urls().items()}

    def poll(self, *, now: float) -> Iterator[tuple[RecoveryUnit, str]]:
        """Yield each server that has begun to answer, with its unit."""
        # A server that was lost with its node would have the supervisor wait, each time, for an answer that cannot come.
        ended = {role.child.spec.unit for role in self._roles.values() if not role.is_running}
        for unit, probe in self._probes.items():
            if unit not in ended:
                for url in probe.poll(now=now):
                    yield unit, url

    def restart(self, unit: RecoveryUnit) -> None:
        """Note that `unit` is started again."""
        if unit in self._probes:
            self._probes[unit].restart(self._attempts.server_urls()[unit])

    def is_answering(self, unit: RecoveryUnit) -> bool:
        """Return whether `unit` has servers, all of which have answered since its last start."""
        return unit in self._probes and self._probes[unit].are_all_ready

    def has_progressed(self, unit: RecoveryUnit) -> bool:
        """Return whether every server of `unit` has answered, its workers run groups, or the trainer has finished a step."""
        if unit in self._probes:
            return self.is_answering(unit)
        if unit != TRAINING:
            roles = [role for role in self._roles.values() if role.child.spec.unit == unit]
            return any(report.activity == RUNNING_GROUPS for role in roles for report in role.reports.readable)
        return self.last_step() > (self._attempts.from_step or 0)

    def last_step(self) -> int:
        """Return the last step that the trainer of this attempt has finished, 0 for none."""
        trainer = self._roles.get(TRAINER)
        return trainer.last_step(attempt=self._attempts.run.attempt) if trainer is not None else 0


def answers(base_url: str) -> bool:
    """Return whether GET /health of the server at `base_url` says 200."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
