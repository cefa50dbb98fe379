"""Splits a command line into files after `@`, flags, and the requests for help and a dry run. It decodes no value."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trivet.config.findings import Findings
from trivet.config.keys import Shape, find_key
from trivet.config.schema.base import Section
from trivet.config.sources import Entry, Text
from trivet.shown_text import shorten

_BOOLEANS = {"true": True, "false": False}


@dataclass(slots=True)
class Arguments:
    """A command line, split into its parts."""

    files: list[tuple[Path, tuple[str, ...]]] = field(default_factory=list[tuple[Path, tuple[str, ...]]])
    """Files after `@`, each with the section that it fills: `--trainer @ t.toml`."""
    flags: list[Entry] = field(default_factory=list[Entry])
    help_section: str | None = None
    """The section of which help is wanted; empty for all, None for no help."""
    is_dry_run: bool = False
    omits_defaults: bool = False
    """A dry run prints no value that is the default."""


def parse_arguments(kind: type[Section], argv: Sequence[str], findings: Findings) -> Arguments:
    """Split `argv`; whether a flag takes a value depends on its key in `kind`."""
    arguments = Arguments()
    words = list(argv)
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


def _number_repeated(kind: type[Section], flags: Sequence[Entry]) -> list[Entry]:
    """Number repeated flags of a list of sections: the first flag, when it comes again, begins the next entry."""
    firsts: dict[tuple[str, ...], tuple[str, ...]] = {}
    """First flag of each list, by the list's path."""
    last_index: dict[tuple[str, ...], int] = {}
    """Entry that the last flag of each list is about."""
    placed: list[tuple[Entry, tuple[str, ...] | None, int]] = []
    for flag in flags:
        inside, index = _list_of(kind, flag.path), 0
        if inside is not None:
            begins_next = inside in firsts and flag.path == firsts[inside]
            firsts.setdefault(inside, flag.path)
            index = last_index[inside] = last_index.get(inside, 0) + begins_next
        placed.append((flag, inside, index))
    return [
        replace(flag, path=(*inside, str(index), *flag.path[len(inside) :])) if inside and last_index[inside] else flag
        for flag, inside, index in placed
    ]


def _list_of(kind: type[Section], path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the list of sections that `path` enters without saying which entry, or None."""
    for at in range(1, len(path)):
        key = find_key(kind, path[:at])
        if key and key.shape is Shape.SECTION_LIST:
            return None if path[at].isdecimal() else path[:at]
    return None


def _take_file(word: str, words: list[str], under: tuple[str, ...], arguments: Arguments, findings: Findings) -> None:
    name = word[1:] or (words.pop(0) if words else "")
    if name:
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
