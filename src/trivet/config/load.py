"""Turns one command line into one validated configuration. Called by `config.command`; starts nothing and changes nothing.

Values are read from their sources (`sources`), their keys get the current spelling (`spellings`), and they are laid over each other
(`values`) by precedence: flags > files, of which later ones win > environment > defaults. Then unknown keys are refused, a run's
shared values are filled in (`resolve`), and the result is validated and checked (`check`). A source is a list of entries, each a
key with its value and its origin.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

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
from trivet.config.sources import Arguments, parse_arguments, read_environment, read_toml
from trivet.config.spellings import use_current_names, use_underscores
from trivet.config.tables import as_list
from trivet.config.user_input import MAX_INTEGER, describe_integer, usable_path
from trivet.config.values import UNSET, Entry, Values, flatten
from trivet.errors import ConfigError
from trivet.shown_text import shorten

SectionT = TypeVar("SectionT", bound=Section)

COMMANDS: tuple[type[Section], ...] = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SftConfig, EvalConfig)
"""The commands whose environment variables the other commands ignore, by their configuration."""

FILE_COMMANDS: dict[type[Section], str] = {RLConfig: "rl", VfRLConfig: "vf-rl", SftConfig: "sft", EvalConfig: "eval"}
"""The commands for which users write files, by their configuration."""

_MAX_SUGGESTIONS = 10
"""Number of unknown keys for which the nearest known key is searched. Each search takes about 20 ms."""

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
"""The text that says what a key allows, by the type of pydantic's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig(Generic[SectionT]):
    """A configuration, the origin of each value, and the notices that the user should read once."""

    config: SectionT
    origins: Mapping[str, str]
    """Origin of each value by dotted key. A key without an origin has its default."""
    notices: Sequence[str]
    omits_defaults: bool = False
    """True if `to_shown_toml` leaves out keys that have their defaults."""

    def to_shown_toml(self) -> str:
        """Return the configuration as TOML for people: with origins, and without secrets."""
        return to_toml(self.config, origins=self.origins, is_masked=True, omits_defaults=self.omits_defaults)


def load_config(
    kind: type[SectionT], argv: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> LoadedConfig[SectionT]:
    """Load a configuration of class `kind` from a command line and environment variables.

    Args:
        kind: the class of the configuration, such as RLConfig.
        argv: the words after the command's name.
        environ: environment variables; None uses those of this process.

    Raises a ConfigError that lists every problem found.
    """
    findings = Findings()
    arguments = parse_arguments(kind, argv, findings)
    return load_arguments(kind, arguments, findings, environ=os.environ if environ is None else environ)


def load_arguments(
    kind: type[SectionT], arguments: Arguments, findings: Findings, *, environ: Mapping[str, str]
) -> LoadedConfig[SectionT]:
    """Do the same with arguments that were parsed already. The problems of parsing are in `findings`."""
    sources = [environment_entries(kind, environ)]
    are_sources_complete = not findings.problems
    for file, section in arguments.files:
        try:
            entries = read_toml(file, section=section)
        except ConfigError as exc:
            are_sources_complete = False
            findings.refuse(str(exc))
            continue
        if kind in FILE_COMMANDS and not _has_every_key(kind, entries):
            for other, command in FILE_COMMANDS.items():
                if _has_every_key(other, entries):
                    raise ConfigError(f"{file} is a configuration of `{command}`; run it with: uv run {command} @ {file}")
        sources.extend(list(flatten(use_underscores(kind, entry, findings))) for entry in entries)
    return load_sources(kind, [*sources, arguments.flags], findings, are_sources_complete=are_sources_complete)


def _has_every_key(kind: type[Section], entries: Sequence[Entry]) -> bool:
    """Return whether `kind` has all keys of `entries`, with underscores in place of dashes."""
    leaves = (inner.path for entry in entries for inner in flatten(entry))
    return all(find_key(kind, tuple(str(part).replace("-", "_") for part in path)) for path in leaves)


def load_sources(
    kind: type[SectionT], sources: Sequence[Sequence[Entry]], findings: Findings, *, are_sources_complete: bool = True
) -> LoadedConfig[SectionT]:
    """Load a configuration like `load_config`, from sources that were read already. A later source wins.

    Args:
        are_sources_complete: False if a source could not be read. Missing keys are then not reported, because it may set them.
    """
    values = Values(kind)
    for entry in (entry for entries in sources for entry in use_current_names(kind, entries, findings)):
        try:
            values.add(entry)
        except ValueError as exc:
            findings.refuse(f"{shorten(dotted(entry.path))}: {exc} ({entry.origin})")
    _refuse_unknown(kind, values, findings)
    if kind is RLConfig:
        resolve(values, findings)
    try:
        config = kind.model_validate(values.tree())
    except ValidationError as exc:
        errors = [(error, _without_tags(kind, error["loc"])) for error in exc.errors(include_url=False)]
        # A wrong value that was copied to other keys is reported once, at the key that the user set.
        own_errors = [(error, path) for error, path in errors if not values.is_derived(path)]
        for error, path in own_errors or errors:
            if error["type"] != "missing" or are_sources_complete:
                findings.refuse(_describe_error(error, path, values))
        findings.raise_problems()
        raise AssertionError("a source that cannot be read is a problem") from exc
    _refuse_unusable(config, findings)
    if not findings.problems:
        check(config, findings)
    findings.raise_problems()
    return LoadedConfig(config=config, origins=values.origins(), notices=tuple(findings.notices))


def environment_entries(kind: type[Section], environ: Mapping[str, str]) -> list[Entry]:
    """Return the entries of the variables with the prefix TRIVET_. A variable that sets a key of other commands is left out."""

    def concerns_kind(path: KeyPath) -> bool:
        is_dialect_key = find_key(VfRLConfig, path) is not None
        if kind is VfRLConfig:
            return is_dialect_key
        if is_dialect_key and find_key(kind, path) is None:
            return False
        kinds = [command for command in COMMANDS if find_key(command, path[:1])]
        return not kinds or kind in kinds  # a variable that no command has is kept: it is refused as an unknown key

    return [entry for entry in read_environment(environ) if concerns_kind(entry.path)]


def _refuse_unknown(kind: type[Section], values: Values, findings: Findings) -> None:
    """Refuse unknown keys and remove them, so that the other keys are still validated.

    A table in place of a value stays: validation reports it.
    """
    for entry in values.entries():
        path = entry.path
        length = next((length for length in range(1, len(path) + 1) if find_key(kind, path[:length]) is None), None)
        if length is None:
            continue
        unknown, parent = path[:length], find_key(kind, path[: length - 1])
        if parent is None or parent.shape is not Shape.SECTION:
            continue
        can_suggest = len(findings.problems) < _MAX_SUGGESTIONS
        nearest = (nearest_key(kind, unknown) or nearest_key(kind, path)) if can_suggest else None
        hint = f"; did you mean {nearest}?" if nearest else "; --help lists the keys"
        findings.refuse(f"unknown key {shorten(dotted(unknown))} ({entry.origin}){hint}")
        values.remove(path)


def _refuse_unusable(config: Section, findings: Findings, path: KeyPath = ()) -> None:
    """Refuse values of the right type that no machine can use: impossible paths, and integers beyond 64 bits."""
    for name, value in config:
        items = as_list(value) or [value]
        for index, item in enumerate(items):
            item_path = (*path, name, index) if len(items) > 1 else (*path, name)
            if isinstance(item, Section):
                _refuse_unusable(item, findings, item_path)
            elif isinstance(item, Path):
                try:
                    usable_path(item, key=str(Key(*item_path)))
                except ConfigError as exc:
                    findings.refuse(str(exc))
            elif isinstance(item, int) and abs(item) > MAX_INTEGER:
                findings.refuse(f"{Key(*item_path)} must be a whole number of at most 64 bits, got {describe_integer(item)}")


def _describe_error(error: ErrorDetails, path: KeyPath, values: Values) -> str:
    """Return the problem that an error of pydantic's stands for, under the user's name of the key at `path`."""
    key, context = Key(*path), error.get("ctx", {})
    origin = f" ({values.origin(path)})" if values.find(path) is not UNSET else ""
    match error["type"]:
        case "extra_forbidden":
            type_path = (*path[:-1], "type")
            found_type = values.find(type_path)
            shown = None if found_type is UNSET else found_type
            return f'{key} does not apply to {Key(*type_path)} "{shown}"; remove it or change the type{origin}'
        case "missing":
            return f"{key} is missing: it has no default; set it"
        case "union_tag_not_found":
            return f"{key.type} is missing; {key} has keys that depend on it{origin}"
        case "union_tag_invalid":
            return f'{key.type} must be one of {context["expected_tags"]}, got "{context["tag"]}"{origin}'
        case _:
            expected, found = _EXPECTED.get(error["type"]), mask(path, error["input"])
    problem = (
        f"must be {expected.format(**context)}" if expected else f"is not valid: {error['msg'].removeprefix('Value error, ')}"
    )
    if isinstance(found, str):
        found = f'"{shorten(found)}"'
    elif isinstance(found, int) and not isinstance(found, bool):
        found = describe_integer(found)
    else:
        found = shorten(str(found))
    return f"{key} {problem}, got {found}{origin}"


def _without_tags(kind: type[Section], location: KeyPath) -> KeyPath:
    """Return the path of the key at which pydantic found an error.

    In a section that a `type` key chooses, pydantic's location also contains the type's name, which is left out here.
    """
    path: KeyPath = ()
    for part in location:
        key = find_key(kind, path)
        if not (key and len(key.sections) > 1 and part in {section.model_fields["type"].default for section in key.sections}):
            path = (*path, part)
    return path
