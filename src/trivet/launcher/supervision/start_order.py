"""Decides when each role of a starting run is started: the servers first, and no more at once than there are cores.

What a role does first is to import, for seconds and in one thread. The inference server needs the longest for it, and nothing can
be sampled before it is ready: beside more processes than cores it would only be ready later.
"""

from collections.abc import Collection
from typing import Protocol

from trivet.launcher.plan import ORCHESTRATOR
from trivet.launcher.supervision.role_processes import RoleProcess

_MAX_START_S = 30.0
"""A role that says nothing of itself counts as starting for this long. Imports are over by then: it is doing something else."""


class LoadingEnvironments(Protocol):
    """The environments of a run, which are being loaded to find what is wrong with them."""

    @property
    def is_over(self) -> bool:
        """True when `wait` returns or raises at once."""
        ...

    def wait(self) -> object:
        """Return when all are loaded.

        Raises:
            EnvironmentLoadError: one cannot be.
        """
        ...


class StartOrder:
    """The order of one run's start.

    >>> order = StartOrder(environments, num_cpus=2)
    >>> order.may_start("orchestrator", started=roles.values(), answering={"inference"}, now=clock.now())
    False
    """

    def __init__(self, environments: LoadingEnvironments, *, num_cpus: int) -> None:
        """Begin with no role started.

        Args:
            num_cpus: cores that the run may use.
        """
        self._environments = environments
        self._num_cpus = num_cpus
        self._are_loaded = False

    def may_start(
        self,
        name: str,
        *,
        started: Collection[RoleProcess],
        answering: Collection[str],
        after: Collection[str] = (),
        now: float,
    ) -> bool:
        """Return whether the role `name` is started now.

        Args:
            answering: names of the roles whose servers answer.
            after: names of those that must answer first.
            now: in seconds, of the clock that dated the starts.

        Raises:
            EnvironmentLoadError: an environment cannot be loaded.
        """
        if not self._are_loaded and self._environments.is_over:
            self._environments.wait()
            self._are_loaded = True
        if name == ORCHESTRATOR and not self._are_loaded:
            return False  # it would load the same, and say the same error
        if not set(after) <= set(answering):
            return False
        num_starting = sum(not _is_up(role, has_answered=role.name in answering, now=now) for role in started)
        return num_starting == 0 or num_starting + (not self._are_loaded) < self._num_cpus


def _is_up(role: RoleProcess, *, has_answered: bool, now: float) -> bool:
    """Return whether a role no longer computes to start: it serves, waits for another, or has taken longer than that."""
    return has_answered or any(report.waits_for for report in role.reports.readable) or now - role.started_at > _MAX_START_S
