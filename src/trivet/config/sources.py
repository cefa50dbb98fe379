"""Reads the sources of a configuration as entries: files, variables, and the words of a command line. It decodes no value."""

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
"""Files that inherit from each other; doubling lists of such files would otherwise take hours to read."""
_BOOLEANS = {"true": True, "false": False}


def read_toml(path: Path, *, under: KeyPath = (), _readers: tuple[Path, ...] = ()) -> list[Entry]:
    """Return the tables of `path` and of the files that it inherits from, in order of rising precedence.

    `under` is the section that they fill. Raises ConfigError, which names file and line, when one cannot be read.
    """
    resolved = usable_path(path, key=INHERIT_KEY if _readers else "@").resolve()
    if resolved in _readers:
        raise ConfigError(f"{path} inherits from itself through {INHERIT_KEY}: {' -> '.join(str(p) for p in _readers)}")
    try:
        content = read_toml_file(path)
    except OSError as exc:
        heir = f" ({INHERIT_KEY} of {_readers[-1]} names it, counted from that file's folder)" if _readers else ""
        raise ConfigError(f"{path} cannot be read: {exc.strerror}{heir}") from exc
    except ValueError as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc
    spellings = [name for name in content if name.replace("-", "_") == INHERIT_KEY]
    if len(spellings) > 1:
        raise ConfigError(f"{' and '.join(spellings)} are two spellings of one key ({path}); remove one")
    bases: object = content.pop(spellings[0]) if spellings else []
    names = [base for base in as_list(bases) or [] if isinstance(base, str)]
    if len(_readers) >= _MAX_INHERITED:
        raise ConfigError(f"{path} inherits through more than {_MAX_INHERITED} files; {INHERIT_KEY} is nested too deep")
    if names != bases:
        raise ConfigError(f'{INHERIT_KEY} in {path} must be a list of file names, e.g. {INHERIT_KEY} = ["base.toml"]')
    readers = (*_readers, resolved)
    inherited = [entry for base in names for entry in read_toml(path.parent / base, under=under, _readers=readers)]
    return [*inherited, Entry(path=under, value=content, origin=str(path))]


def read_environment(environ: Mapping[str, str]) -> list[Entry]:
    """Return entries of the variables with our prefix: `TRIVET_A__B=value` sets `a.b`."""
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
    """The section of which help is wanted; empty for all, None for no help."""
    is_dry_run: bool = False
    omits_defaults: bool = False
    """A dry run prints no value that is the default."""


def parse_arguments(kind: type[Section], argv: Sequence[str], findings: Findings) -> Arguments:
    """Split the words after the command's name; whether a flag takes a value depends on its key in `kind`."""
    arguments, words = Arguments(), list(argv)
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            is_section = words and not words[0].startswith(("-", "@"))
            arguments.help_section = words.pop(0) if is_section else arguments.help_section or ""
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
    arguments.flags = _number_repeated(kind, arguments.flags)
    return arguments


def _take_file(word: str, words: list[str], under: KeyPath, arguments: Arguments, findings: Findings) -> None:
    if name := word[1:] or (words.pop(0) if words else ""):
        arguments.files.append((Path(name), under))
    else:
        findings.refuse("@ must be followed by a TOML file")


def _take_flag(kind: type[Section], word: str, words: list[str], arguments: Arguments, findings: Findings) -> None:
    name, equals, text = word.partition("=")
    path = tuple(name.removeprefix("--").replace("-", "_").split("."))
    following = words[0] if words else ""
    key = find_key(kind, path)
    negated = (path[0].removeprefix("no_"), *path[1:]) if name.startswith("--no-") else ()
    value: object
    if equals:
        value = Text(text)
    elif key is None and negated and (turned := find_key(kind, negated)):
        path = negated
        value = False if turned.shape in (Shape.BOOL, Shape.BOOL_OR_VALUE) else None
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


def _number_repeated(kind: type[Section], flags: Sequence[Entry]) -> list[Entry]:
    """Number repeated flags of a list of sections: the first flag, when it comes again, begins the next entry."""
    firsts: dict[KeyPath, KeyPath] = {}
    """First flag of each list, by the list's path."""
    indexes: dict[KeyPath, int] = {}
    """Entry that the last flag of each list is about."""
    placed: list[tuple[Entry, KeyPath | None, int]] = []
    for flag in flags:
        above = [flag.path[:end] for end in range(1, len(flag.path)) if not str(flag.path[end]).isdecimal()]
        inside = next((at for at in above if (key := find_key(kind, at)) and key.shape is Shape.SECTION_LIST), None)
        if inside is not None:
            begins_next = flag.path == firsts.setdefault(inside, flag.path) and inside in indexes
            indexes[inside] = indexes.get(inside, 0) + begins_next
        placed.append((flag, inside, indexes[inside] if inside else 0))
    return [
        replace(flag, path=(*inside, str(index), *flag.path[len(inside) :])) if inside and indexes[inside] else flag
        for flag, inside, index in placed
    ]
