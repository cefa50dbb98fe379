"""Collects what loading a configuration must tell the user: problems, which stop it, and notices, which do not."""

from collections.abc import Callable
from dataclasses import dataclass, field

from trivet.errors import ConfigError

_MAX_LISTED = 50
"""Problems that are listed. Nobody reads more, and a file can have any number."""


@dataclass(slots=True)
class Findings:
    """Collected from every stage, so that one load reports all its problems together."""

    rename_keys: Callable[[str], str] = str
    """Returns a text with its keys as the user wrote them. For commands that translate their keys before these are checked."""
    problems: list[str] = field(default_factory=list[str])
    notices: list[str] = field(default_factory=list[str])
    num_unlisted: int = 0
    """Problems beyond those that are listed."""

    def refuse(self, problem: str) -> None:
        """Add a problem, unless it was added before."""
        problem = self.rename_keys(problem)
        if problem in self.problems:
            return
        if len(self.problems) >= _MAX_LISTED:
            self.num_unlisted += 1
        else:
            self.problems.append(problem)

    def notice(self, notice: str) -> None:
        """Add a notice, unless it was added before."""
        notice = self.rename_keys(notice)
        if notice not in self.notices:
            self.notices.append(notice)

    def raise_problems(self) -> None:
        """Raise the problems as one error, if there are any.

        Raises:
            ConfigError: there is a problem; its text lists them all.
        """
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            unlisted = [f"and {self.num_unlisted} more"] if self.num_unlisted else []
            count = len(self.problems) + self.num_unlisted
            raise ConfigError("\n- ".join([f"{count} problems in the configuration:", *self.problems, *unlisted]))
