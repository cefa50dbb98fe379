"""Collects what loading a configuration must tell the user: problems, which stop it, and notices, which do not."""

from dataclasses import dataclass, field

from trivet.config.keys import KeyPath, dotted
from trivet.config.masking import hide_in_addresses
from trivet.errors import ConfigError
from trivet.key_names import key_name

_MAX_LISTED = 50
"""Problems that are listed. Nobody reads more, and a file can have any number."""


class Key:
    """A key of the configuration. Its text is the name by which the user knows it."""

    __slots__ = ("_path",)

    def __init__(self, *path: str | int) -> None:
        self._path: KeyPath = path

    def __getattr__(self, name: str) -> "Key":
        """Return the key `name` below this one."""
        if name.startswith("_"):  # Python's own protocols ask for such names
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, part: str | int) -> "Key":
        """Return the key below this one that is called `part`, or the entry of that index."""
        return Key(*self._path, part)

    def __str__(self) -> str:
        return key_name(dotted(self._path))


ROOT = Key()
"""The key above all others: `ROOT.max_steps` is `max_steps`."""


@dataclass(slots=True)
class Findings:
    """Collected from every stage, so that one load reports all its problems together, each once."""

    problems: list[str] = field(default_factory=list[str])
    num_unlisted: int = 0
    """Problems beyond those that are listed."""
    notices: list[str] = field(default_factory=list[str])

    def refuse(self, problem: str) -> None:
        """Add a problem, unless it was added before: two keys of a run can be one key of the user's."""
        text = hide_in_addresses(problem)
        if text not in self.problems and len(self.problems) < _MAX_LISTED:
            self.problems.append(text)
        elif text not in self.problems:
            self.num_unlisted += 1

    def notice(self, notice: str) -> None:
        """Add a notice."""
        if (text := hide_in_addresses(notice)) not in self.notices:
            self.notices.append(text)

    def raise_problems(self) -> None:
        """Raise a ConfigError that lists the problems, if there are any."""
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            unlisted = [f"and {self.num_unlisted} more"] if self.num_unlisted else []
            count = len(self.problems) + self.num_unlisted
            raise ConfigError("\n- ".join([f"{count} problems in the configuration:", *self.problems, *unlisted]))
