"""Collects the messages of loading a configuration: problems, which stop the command, and notices, which do not."""

from dataclasses import dataclass, field

from trivet.config.keys import KeyPath, dotted
from trivet.config.masking import hide_in_addresses
from trivet.errors import ConfigError
from trivet.key_names import key_name

_MAX_LISTED = 50
"""Most problems that an error lists. A file can have any number, and nobody reads more."""


class Key:
    """A key of the configuration: `ROOT.trainer.optim.lr` is `trainer.optim.lr`. Its text is the user's name of the key."""

    __slots__ = ("_path",)

    def __init__(self, *path: str | int) -> None:
        self._path: KeyPath = path

    def __getattr__(self, name: str) -> "Key":
        """Return the key `name` below this one."""
        if name.startswith("_"):  # Python itself looks up such names, for instance to copy the object
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, part: str | int) -> "Key":
        """Return the key below this one with the name `part`, or the list's entry with that index."""
        return Key(*self._path, part)

    def __str__(self) -> str:
        return key_name(dotted(self._path))


ROOT = Key()
"""The key above all others: `ROOT.max_steps` is `max_steps`."""


@dataclass(slots=True)
class Findings:
    """The problems and notices of all stages of one load, so that an error lists all problems together, each once."""

    problems: list[str] = field(default_factory=list[str])
    num_unlisted: int = 0
    """Number of problems that are not in `problems` because that list is full."""
    notices: list[str] = field(default_factory=list[str])

    def refuse(self, problem: str) -> None:
        """Add a problem unless its text was added before: two keys of a run can have the same user's name."""
        text = hide_in_addresses(problem)
        if text not in self.problems and len(self.problems) < _MAX_LISTED:
            self.problems.append(text)
        elif text not in self.problems:
            self.num_unlisted += 1

    def notice(self, notice: str) -> None:
        """Add a notice unless its text was added before."""
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
