"""Reads the sources of a configuration as entries: files, environment variables and command lines. It decodes no value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trivet.config.findings import Findings
from trivet.config.keys import KeyPath, Shape, find_key
from trivet.config.layout import OWN_VARIABLES
from trivet.config.schema.base import Section
from trivet.config.tables import as_list
from trivet.config.user_input import read_toml_file, usable_path
from trivet.config.values import Entry, Text
from trivet.errors import ConfigError
from trivet.shown_text import shorten

ENVIRONMENT_PREFIX = "TRIVET_"
INHERIT_KEY = "toml_files"
_MAX_INHERITED = 16
"""Longest chain of files that inherit from each other. If each file listed the next one twice, a long chain would take hours."""
_BOOLEANS = {"true": True, "false": False}


def read_toml(path: Path, *, section: KeyPath = (), _heirs: tuple[Path, ...] = ()) -> list[Entry]:
    """Return the tables of `path` and of the files that it inherits from, in order of rising precedence.

    Args:
        section: the section that the tables fill; empty for the whole configuration.
        _heirs: the files that led to this one by inheritance, the first one first.

    Raises a ConfigError that names file and line if a file cannot be read.
    """
    resolved = usable_path(path, key=INHERIT_KEY if _heirs else "@").resolve()
    if resolved in _heirs:
        raise ConfigError(f"{path} inherits from itself through {INHERIT_KEY}: {' -> '.join(str(p) for p in _heirs)}")
    try:
        content = read_toml_file(path)
    except OSError as exc:
        heir = f" ({INHERIT_KEY} of {_heirs[-1]} names it, counted from that file's folder)" if _heirs else ""
        raise ConfigError(f"{path} cannot be read: {exc.strerror}{heir}") from exc
    except ValueError as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc
    spellings = [name for name in content if name.replace("-", "_") == INHERIT_KEY]
    if len(spellings) > 1:
        raise ConfigError(f"{' and '.join(spellings)} are two spellings of one key ({path}); remove one")
    bases: object = content.pop(spellings[0]) if spellings else []
    names = [base for base in as_list(bases) or [] if isinstance(base, str)]
    if len(_heirs) >= _MAX_INHERITED:
        raise ConfigError(f"{path} inherits through more than {_MAX_INHERITED} files; {INHERIT_KEY} is nested too deep")
    if names != bases:
        raise ConfigError(f'{INHERIT_KEY} in {path} must be a list of file names, e.g. {INHERIT_KEY} = ["base.toml"]')
    heirs = (*_heirs, resolved)
    inherited = [entry for base in names for entry in read_toml(path.parent / base, section=section, _heirs=heirs)]
    return [*inherited, Entry(path=section, value=content, origin=str(path))]


def read_environment(environ: Mapping[str, str]) -> list[Entry]:
    """Return an entry for each variable with the prefix TRIVET_: `TRIVET_A__B=value` sets `a.b`."""
    return [
        Entry(
            path=tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")),
            value=Text(text),
            origin=f"variable {shorten(name)}",
        )
        for name, text in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIX) and name not in OWN_VARIABLES
    ]


@dataclass(slots=True)
class Arguments:
    """A command line, split into its parts."""

    files: list[tuple[Path, KeyPath]] = field(default_factory=list[tuple[Path, KeyPath]])
    """Files after `@`, each with the section that it fills: `--trainer @ t.toml`."""
    flags: list[Entry] = field(default_factory=list[Entry])
    help_section: str | None = None
    """The section that `--help` is to show; empty for all sections, None without `--help`."""
    shows_version: bool = False
    is_dry_run: bool = False
    omits_defaults: bool = False
    """True if a dry run leaves out values that are the default (`--changed`)."""

    @property
    def only_inform(self) -> bool:
        """True if the command prints its help or its version and does nothing else."""
        return self.shows_version or self.help_section is not None


def parse_arguments(kind: type[Section], argv: Sequence[str], findings: Findings) -> Arguments:
    """Split the words after the command's name; whether a flag takes a value depends on its key in `kind`."""
    arguments, words = Arguments(), list(argv)
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            is_section = words and not words[0].startswith(("-", "@"))
            arguments.help_section = words.pop(0) if is_section else arguments.help_section or ""
        elif word == "--version":
            arguments.shows_version = True
        elif word == "--dry-run":
            arguments.is_dry_run = True
        elif word == "--changed":
            arguments.omits_defaults = True
        elif word.startswith("@"):
            _take_file(word, words, (), arguments, findings)
        elif word.startswith("--") and len(word) > 2:
            _take_flag(kind, word, words, arguments, findings)
        else:
            hint = f"; write @ {shorten(word)}" if word.endswith(".toml") else ""
            findings.refuse(f'unexpected argument "{shorten(word)}": files follow @, flags start with --{hint}')
    if arguments.omits_defaults and not arguments.is_dry_run:
        findings.refuse("--changed says what --dry-run prints; add --dry-run")
    arguments.flags = _number_repeated_flags(kind, arguments.flags)
    return arguments


def _take_file(word: str, words: list[str], section: KeyPath, arguments: Arguments, findings: Findings) -> None:
    """Add the file of `word` (`@file.toml`), or of the next one of `words` if `word` is `@` alone. The file fills `section`."""
    name = word[1:] or (words.pop(0) if words else "")
    if name:
        arguments.files.append((Path(name), section))
    else:
        findings.refuse("@ must be followed by a TOML file")


def _take_flag(kind: type[Section], word: str, words: list[str], arguments: Arguments, findings: Findings) -> None:
    """Add the flag `word`. Its value follows `=`, or is the next one of `words`, which is removed from them."""
    name, equals, text = word.partition("=")
    path = tuple(name.removeprefix("--").replace("-", "_").split("."))
    following = words[0] if words else ""
    key = find_key(kind, path)
    negated = (path[0].removeprefix("no_"), *path[1:]) if name.startswith("--no-") else ()
    value: object
    if equals:
        value = Text(text)
    elif key is None and negated and (switch := find_key(kind, negated)):
        path = negated
        value = False if switch.shape in (Shape.BOOL, Shape.BOOL_OR_VALUE) else None
    elif key and key.shape is Shape.BOOL:
        value = _BOOLEANS[words.pop(0).lower()] if following.lower() in _BOOLEANS else True
    elif following.startswith("@") and (key is None or key.shape is Shape.SECTION):
        _take_file(words.pop(0), words, path, arguments, findings)
        return
    elif key and key.shape is Shape.BOOL_OR_VALUE and following.startswith(("@", "--")):
        value = True
    elif following and not following.startswith("--"):
        value = Text(words.pop(0))
    elif key and key.shape is Shape.SECTION:
        value = {}
    elif key is None or key.shape is Shape.BOOL_OR_VALUE:
        value = True
    else:
        findings.refuse(f"flag {name} needs a value")
        return
    arguments.flags.append(Entry(path=path, value=value, origin=f"flag {shorten(name)}"))


def _number_repeated_flags(kind: type[Section], flags: Sequence[Entry]) -> list[Entry]:
    """Add indexes to repeated flags of a list of sections: `--env.id a --env.id b` sets env.0.id and env.1.id.

    The next entry of a list begins when the list's first flag comes again.
    """
    first_flags: dict[KeyPath, KeyPath] = {}
    """The first flag of each list, by the list's path."""
    indexes: dict[KeyPath, int] = {}
    """The index of the entry that the latest flag of each list belongs to."""
    numbered: list[tuple[Entry, KeyPath | None, int]] = []
    """Each flag, with the list that it belongs to, if any, and the index of its entry."""
    for flag in flags:
        parents = [flag.path[:end] for end in range(1, len(flag.path)) if not str(flag.path[end]).isdecimal()]
        section_list = next((at for at in parents if (key := find_key(kind, at)) and key.shape is Shape.SECTION_LIST), None)
        if section_list is not None:
            begins_next = flag.path == first_flags.setdefault(section_list, flag.path) and section_list in indexes
            indexes[section_list] = indexes.get(section_list, 0) + begins_next
        numbered.append((flag, section_list, indexes[section_list] if section_list else 0))
    # Flags of a single entry stay without an index: `Values` finds the list's only entry, or refuses them if there are several.
    return [
        replace(flag, path=(*section_list, str(index), *flag.path[len(section_list) :]))
        if section_list and indexes[section_list]
        else flag
        for flag, section_list, index in numbered
    ]
