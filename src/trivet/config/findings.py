"""Collects what loading a configuration must tell the user: problems, which stop it, and notices, which do not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trivet.config.keys import KeyPath, dotted
from trivet.config.masking import hide_in_addresses
from trivet.errors import ConfigError

_MAX_LISTED = 50
"""Problems that are listed. Nobody reads more, and a file can have any number."""
_MARK = "\ufdd0"
"""Stands before and after a key in the text of a finding. Unicode reserves this character for use inside a program."""


class Key:
    """A key in the text of a finding: a placeholder, for which the user is shown the name that the user knows."""

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
        return f"{_MARK}{dotted(self._path)}{_MARK}"


ROOT = Key()
"""The key above all others: `ROOT.max_steps` is `max_steps`."""


@dataclass(frozen=True, slots=True)
class ConfigFinding:
    """One problem or notice."""

    text: str
    """The text, with a placeholder for each `Key`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the text names, in their order."""
        return tuple(self.text.split(_MARK)[1::2])

    def show(self, name_of: Callable[[str], str] = str) -> str:
        """Return the text for the user, without the passwords of the addresses in it.

        Args:
            name_of: returns the name by which the user knows a key.
        """
        parts = self.text.split(_MARK)
        parts[1::2] = map(name_of, parts[1::2])
        return hide_in_addresses("".join(parts))


@dataclass(slots=True)
class Findings:
    """Collected from every stage, so that one load reports all its problems together."""

    name_of: Callable[[str], str] = str
    """Returns the name by which the user knows a key. A command that translates its keys before they are checked sets it."""
    problems: list[ConfigFinding] = field(default_factory=list[ConfigFinding])
    num_unlisted: int = 0
    """Problems beyond those that are listed."""
    _notices: list[ConfigFinding] = field(default_factory=list[ConfigFinding])

    def refuse(self, problem: str) -> None:
        """Add a problem, unless it was added before. A `Key` in its text is shown by the user's name."""
        finding = ConfigFinding(problem)
        if finding in self.problems:
            return
        if len(self.problems) >= _MAX_LISTED:
            self.num_unlisted += 1
        else:
            self.problems.append(finding)

    def notice(self, notice: str) -> None:
        """Add a notice. A `Key` in its text is shown by the user's name."""
        self._notices.append(ConfigFinding(notice))

    def show_notices(self) -> tuple[str, ...]:
        """Return the texts of the notices, each once."""
        return tuple(self._show(self._notices))

    def raise_problems(self) -> None:
        """Raise the problems as one error, if there are any.

        Raises:
            ConfigError: there is a problem; its text lists them all.
        """
        texts = list(self._show(self.problems))
        if len(texts) == 1:
            raise ConfigError(texts[0])
        if texts:
            unlisted = [f"and {self.num_unlisted} more"] if self.num_unlisted else []
            count = len(texts) + self.num_unlisted
            raise ConfigError("\n- ".join([f"{count} problems in the configuration:", *texts, *unlisted]))

    def _show(self, findings: list[ConfigFinding]) -> Iterator[str]:
        """Yield each text once: two keys of a run can be one key of the user's."""
        yield from dict.fromkeys(finding.show(self.name_of) for finding in findings)
