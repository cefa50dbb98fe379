"""Splits a command line into files after `@`, flags, and the requests for help and a dry run. It decodes no value."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trivet.config.findings import Findings
from trivet.config.keys import Shape, find_key
from trivet.config.schema.base import Section
from trivet.config.user_input import MAX_DEPTH
from trivet.shown_text import shorten

_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileArgument:
    """A file that was named after `@`."""

    path: Path
    under: tuple[str, ...] = ()
    """The section that the file fills: `--trainer @ t.toml`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagArgument:
    """A flag with its value, before the value is decoded."""

    name: str
    """The flag as typed, for messages."""
    path: tuple[str, ...]
    value: str | bool | dict[str, object] | None
    """Text to be decoded by the key's type, unless the flag's form says it: `--x`, `--no-x`, `--section`."""


@dataclass(slots=True)
class Arguments:
    """A command line, split into its parts."""

    files: list[FileArgument] = field(default_factory=list[FileArgument])
    flags: list[FlagArgument] = field(default_factory=list[FlagArgument])
    wants_help: bool = False
    is_dry_run: bool = False


def parse_arguments(kind: type[Section], argv: Sequence[str], findings: Findings) -> Arguments:
    """Split `argv`; whether a flag takes a value depends on its key in `kind`."""
    arguments = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            arguments.wants_help = True
        elif word == "--dry-run":
            arguments.is_dry_run = True
        elif word.startswith("@"):
            _take_file(word, words, (), arguments, findings)
        elif word.startswith("--") and len(word) > 2:
            _take_flag(kind, word, words, arguments, findings)
        else:
            hint = f"; write @ {shorten(word)}" if word.endswith(".toml") else ""
            findings.refuse(f'unexpected argument "{shorten(word)}": files follow @, flags start with --{hint}')
    arguments.flags = _number_repeated(kind, arguments.flags)
    return arguments


def flag_path(name: str) -> tuple[str, ...]:
    """Return `--a.b-c` as the path of its key: ("a", "b_c")."""
    return tuple(name.removeprefix("--").replace("-", "_").split("."))


def _number_repeated(kind: type[Section], flags: Sequence[FlagArgument]) -> list[FlagArgument]:
    """Number repeated flags of a list of sections: the first flag, when it comes again, begins the next entry."""
    firsts: dict[tuple[str, ...], tuple[str, ...]] = {}
    """First flag of each list, by the list's path."""
    indices: dict[tuple[str, ...], list[int]] = {}
    """Entry that each flag is about, by the list's path."""
    lists = [_list_of(kind, flag.path) for flag in flags]
    for flag, inside in zip(flags, lists, strict=True):
        if inside is None:
            continue
        so_far = indices.setdefault(inside, [])
        first = firsts.setdefault(inside, flag.path)
        so_far.append((so_far[-1] + (flag.path == first)) if so_far else 0)
    return [
        replace(flag, path=(*inside, str(indices[inside].pop(0)), *flag.path[len(inside) :]))
        if inside is not None and indices[inside][-1]
        else flag
        for flag, inside in zip(flags, lists, strict=True)
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
        arguments.files.append(FileArgument(path=Path(name), under=under))
    else:
        findings.refuse("@ must be followed by a TOML file")


def _take_flag(kind: type[Section], word: str, words: list[str], arguments: Arguments, findings: Findings) -> None:
    name, equals, text = word.partition("=")
    path = flag_path(name)
    if len(path) > MAX_DEPTH:
        _refuse_depth(name, words, findings, has_value=bool(equals))
        return
    key = find_key(kind, path)
    negated = flag_path(f"--{name.removeprefix('--no-')}") if name.startswith("--no-") else ()
    following = words[0] if words else ""
    value: str | bool | dict[str, object] | None
    if equals:
        value = text
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
        value = words.pop(0)
    elif key and key.shape is Shape.SECTION:
        value = {}
    elif key is None or key.shape is Shape.BOOL_OR_VALUE:
        value = True
    else:
        findings.refuse(f"flag {name} needs a value")
        return
    arguments.flags.append(FlagArgument(name=name, path=path, value=value))


def _refuse_depth(name: str, words: list[str], findings: Findings, *, has_value: bool) -> None:
    """Refuse a key of too many parts, and skip the word that looks like its value."""
    findings.refuse(f"flag {shorten(name)}: a key has at most {MAX_DEPTH} parts")
    if not has_value and words and not words[0].startswith(("--", "@")):
        words.pop(0)
