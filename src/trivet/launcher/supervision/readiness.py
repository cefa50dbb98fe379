"""Finds out whether inference servers answer, and whether a unit of the run has done something since it was started."""

import http.client
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from trivet.launcher.plan import TRAINER, TRAINING, RecoveryUnit
from trivet.launcher.supervision.attempts import Attempts
from trivet.launcher.supervision.role_processes import RoleProcess
from trivet.wire.status import RUNNING_GROUPS

_POLL_INTERVAL_S = 2.0
"""A server that loads a model takes tens of seconds; more requests would find out nothing sooner."""
_TIMEOUT_S = 1.0
"""The supervisor waits for the answer. A server that takes longer is asked again."""


class ReadyProbe:
    """Names each server once when it has begun to answer, and once more after `restart`.

    >>> probe = ReadyProbe(["http://127.0.0.1:8000/v1"])
    >>> probe.poll(now=clock())
    ['http://127.0.0.1:8000/v1']
    """

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
    """Tells whether a unit has done something since its last start: its servers have answered, or a step was finished.

    >>> progress = UnitProgress(attempts, roles)
    >>> for unit, url in progress.poll(now=clock()): print(unit, "ready", url)
    >>> progress.has_progressed(TRAINING)
    False
    """

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
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
