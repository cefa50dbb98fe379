"""Turns one command line into one validated configuration. Called by `config.command`; starts nothing and changes nothing.

A value is read from its source (`sources`), spelled as today (`spellings`) and laid over others by precedence: flags > files, of
which later ones win > environment > defaults. Then unknown keys are refused, a run's shared values are filled in (`resolve`), and
the whole is validated and checked (`check`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trivet.config.arguments import Arguments, parse_arguments
from trivet.config.check import check
from trivet.config.dump import to_toml
from trivet.config.findings import Findings, Key
from trivet.config.keys import KeyPath, Shape, dotted, find_key, nearest_key
from trivet.config.masking import mask
from trivet.config.resolve import resolve
from trivet.config.schema.base import Section
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.trainer import TrainerConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.config.sources import UNSET, Entry, Values, flatten, read_environment, read_toml
from trivet.config.spellings import use_current_names, use_underscores
from trivet.config.tables import as_list, as_table
from trivet.config.user_input import MAX_INTEGER, describe_integer, usable_path
from trivet.errors import ConfigError
from trivet.shown_text import shorten

SectionT = TypeVar("SectionT", bound=Section)

COMMANDS: tuple[type[Section], ...] = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SftConfig, EvalConfig)
"""Commands whose variables are ignored by the others."""

FILE_COMMANDS: dict[type[Section], str] = {RLConfig: "rl", VfRLConfig: "vf-rl", SftConfig: "sft", EvalConfig: "eval"}
"""Commands that users write files for."""

_MAX_SUGGESTIONS = 10
"""Problems for which a nearest key is looked for; each search takes some 20 ms."""

_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_parsing_size": "a whole number of at most 64 bits",
    "string_unicode": "text in UTF-8",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
    "literal_error": "one of {expected}",
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "too_short": "of at least {min_length} entries",
}
"""Text of what is allowed, by pydantic's type of error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig(Generic[SectionT]):
    """A configuration, where each of its values came from, and what the user should be told once."""

    config: SectionT
    origins: Mapping[str, str]
    """Origin of each value by dotted key; a key that is not here has its default."""
    notices: Sequence[str]
    omits_defaults: bool = False
    """True: `to_shown_toml` leaves out what has its default."""

    def to_shown_toml(self) -> str:
        """Return the configuration for people: with origins, and without secrets."""
        return to_toml(self.config, origins=self.origins, is_masked=True, omits_defaults=self.omits_defaults)


def load_config(
    kind: type[SectionT], argv: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> LoadedConfig[SectionT]:
    """Load a `kind` from the words after the command's name.

    Args:
        environ: variables; None takes those of this process.

    Raises:
        ConfigError: lists every problem found.
    """
    findings = Findings()
    arguments = parse_arguments(kind, argv, findings)
    return load_arguments(kind, arguments, findings, environ=os.environ if environ is None else environ)


def load_arguments(
    kind: type[SectionT], arguments: Arguments, findings: Findings, *, environ: Mapping[str, str]
) -> LoadedConfig[SectionT]:
    """Load a `kind` from parsed arguments, whose problems `findings` holds. Else like `load_config`."""
    sources = [environment_entries(kind, environ)]
    is_whole = not findings.problems
    for file, under in arguments.files:
        try:
            entries = read_toml(file, under=under)
        except ConfigError as exc:
            is_whole = False
            findings.refuse(str(exc))
        else:
            _refuse_other_command(kind, entries, file)
            sources.extend(list(flatten(use_underscores(kind, entry, findings))) for entry in entries)
    return load_sources(kind, [*sources, arguments.flags], findings, is_whole=is_whole)


def _refuse_other_command(kind: type[Section], entries: Sequence[Entry], path: Path) -> None:
    """Refuse a file that another command reads whole and this one does not.

    Raises:
        ConfigError: names the command that reads the file.
    """
    if kind not in FILE_COMMANDS or all(_has_every_key(kind, entry.value, entry.path) for entry in entries):
        return
    for other, command in FILE_COMMANDS.items():
        if all(_has_every_key(other, entry.value, entry.path) for entry in entries):
            raise ConfigError(f"{path} is a configuration of `{command}`; run it with: uv run {command} @ {path}")


def _has_every_key(kind: type[Section], value: object, path: KeyPath) -> bool:
    key, table = find_key(kind, path), as_table(value)
    if key is None or key.shape is not Shape.SECTION:
        return key is not None
    return table is not None and all(_has_every_key(kind, table[name], (*path, name.replace("-", "_"))) for name in table)


def load_sources(
    kind: type[SectionT], sources: Sequence[Sequence[Entry]], findings: Findings, *, is_whole: bool = True
) -> LoadedConfig[SectionT]:
    """Load a `kind` from values already read. Else like `load_config`.

    Args:
        sources: later ones win.
        is_whole: False when one could not be read, so that keys seem missing which it sets.
    """
    values = Values(kind)
    for entry in (entry for entries in sources for entry in use_current_names(kind, entries, findings)):
        try:
            values.add(entry)
        except ValueError as exc:
            findings.refuse(f"{shorten('.'.join(entry.path))}: {exc} ({entry.origin})")
    _refuse_unknown(kind, values, findings, values.tree)
    if kind is RLConfig:
        resolve(values, findings)
    config = _validate(kind, values, findings, is_whole=is_whole)
    if config is not None:
        _refuse_unusable(config, findings)
    if config is not None and not findings.problems:
        check(config, findings)
    findings.raise_problems()
    assert config is not None
    return LoadedConfig(config=config, origins=values.origins(), notices=tuple(findings.notices))


def environment_entries(kind: type[Section], environ: Mapping[str, str]) -> list[Entry]:
    """Return variables with our prefix. Those that only other commands know are left out."""
    return [entry for entry in read_environment(environ) if not _is_for_another_command(kind, entry)]


def _is_for_another_command(kind: type[Section], entry: Entry) -> bool:
    is_of_dialect = find_key(VfRLConfig, entry.path) is not None
    if kind is VfRLConfig:
        return not is_of_dialect
    known = [command for command in COMMANDS if find_key(command, entry.path[:1])]
    return (bool(known) and kind not in known) or (is_of_dialect and find_key(kind, entry.path) is None)


def _refuse_unknown(kind: type[Section], values: Values, findings: Findings, node: object, path: KeyPath = ()) -> None:
    """Refuse unknown keys below `node` and take them out, so that what remains is still validated."""
    key, table = find_key(kind, path), as_table(node)
    for index, item in enumerate(as_list(node) or ()):
        _refuse_unknown(kind, values, findings, item, (*path, index))
    if table is None or key is None or key.shape not in (Shape.SECTION, Shape.SECTION_LIST):
        return
    for name, item in list(table.items()):
        here = (*path, name)
        if find_key(kind, here):
            _refuse_unknown(kind, values, findings, item, here)
            continue
        del table[name]
        does_suggest = len(findings.problems) < _MAX_SUGGESTIONS
        nearest = (nearest_key(kind, here) or nearest_key(kind, _first_path(item, here))) if does_suggest else None
        hint = f"; did you mean {nearest}?" if nearest else "; --help lists the keys"
        findings.refuse(f"unknown key {shorten(dotted(here))} ({values.origin(here)}){hint}")


def _first_path(node: object, path: KeyPath) -> KeyPath:
    """Return the path of the first value in the tables below `node`."""
    while table := as_table(node):
        name, node = next(iter(table.items()))
        path = (*path, name)
    return path


def _validate(kind: type[SectionT], values: Values, findings: Findings, *, is_whole: bool) -> SectionT | None:
    try:
        return kind.model_validate(values.tree)
    except ValidationError as exc:
        errors = [(error, _without_tags(kind, error["loc"])) for error in exc.errors(include_url=False)]
        first_hand = [(error, path) for error, path in errors if not values.is_derived(path)]
        for error, path in first_hand or errors:
            if error["type"] != "missing" or is_whole:
                findings.refuse(_describe(error, path, values, findings))
    return None


def _refuse_unusable(config: Section, findings: Findings, path: KeyPath = ()) -> None:
    """Refuse values of the right type that no machine can work with: impossible paths, integers beyond 64 bits."""
    for name, value in config:
        items = as_list(value) or [value]
        for index, item in enumerate(items):
            here = (*path, name, index) if len(items) > 1 else (*path, name)
            key = Key(*here)
            if isinstance(item, Section):
                _refuse_unusable(item, findings, here)
            elif isinstance(item, Path):
                try:
                    usable_path(item, key=str(key))
                except ConfigError as exc:
                    findings.refuse(str(exc))
            elif isinstance(item, int) and abs(item) > MAX_INTEGER:
                findings.refuse(f"{key} must be a whole number of at most 64 bits, got {describe_integer(item)}")


def _describe(error: ErrorDetails, path: KeyPath, values: Values, findings: Findings) -> str:
    key = Key(*path)
    origin = f" ({values.origin(path)})" if values.find(dotted(path)) is not UNSET else ""
    if error["type"] == "extra_forbidden":
        chooser = (*path[:-1], "type")
        tag = values.find(dotted(chooser))
        return (
            f'{key} does not apply to {Key(*chooser)} "{None if tag is UNSET else tag}"; remove it or change the type{origin}'
        )
    if error["type"] == "missing":
        return f"{key} is missing: it has no default; set it"
    if error["type"] == "union_tag_not_found":
        return f"{key.type} is missing; {key} has keys that depend on it{origin}"
    context: dict[str, Any] = error.get("ctx", {})
    if error["type"] == "union_tag_invalid":
        return f'{key.type} must be one of {context["expected_tags"]}, got "{context["tag"]}"{origin}'
    expected = _EXPECTED.get(error["type"])
    problem = f"must be {expected.format(**context)}" if expected else f"is not valid: {error['msg']}"
    return f"{key} {problem}, got {_shown(mask(path, error['input']))}{origin}"


def _shown(value: object) -> str:
    if isinstance(value, int):
        return describe_integer(value) if not isinstance(value, bool) else str(value)
    return f'"{shorten(value)}"' if isinstance(value, str) else shorten(str(value))


def _without_tags(kind: type[Section], location: tuple[str | int, ...]) -> KeyPath:
    """Return the user's key for the location of an error: pydantic adds the chosen type of a section to it."""
    path: KeyPath = ()
    for part in location:
        key = find_key(kind, path)
        if not (key and len(key.sections) > 1 and part in {section.model_fields["type"].default for section in key.sections}):
            path = (*path, part)
    return path
