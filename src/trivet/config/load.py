"""Turns one command line into one validated configuration. Called by `config.command`; starts nothing and changes nothing.

A value is read from its source (`sources`), spelled as today (`spellings`) and laid over others (`values`) by precedence: flags >
files, of which later ones win > environment > defaults. Then unknown keys are refused, a run's shared values are filled in
(`resolve`), and the whole is validated and checked (`check`).
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
    """Load a `kind` from the words after the command's name and from variables, by default those of this process.

    Raises a ConfigError that lists every problem found.
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
            continue
        if kind in FILE_COMMANDS and not _has_every_key(kind, entries):
            for other, command in FILE_COMMANDS.items():
                if _has_every_key(other, entries):
                    raise ConfigError(f"{file} is a configuration of `{command}`; run it with: uv run {command} @ {file}")
        sources.extend(list(flatten(use_underscores(kind, entry, findings))) for entry in entries)
    return load_sources(kind, [*sources, arguments.flags], findings, is_whole=is_whole)


def _has_every_key(kind: type[Section], entries: Sequence[Entry]) -> bool:
    leaves = (inner.path for entry in entries for inner in flatten(entry))
    return all(find_key(kind, tuple(str(part).replace("-", "_") for part in path)) for path in leaves)


def load_sources(
    kind: type[SectionT], sources: Sequence[Sequence[Entry]], findings: Findings, *, is_whole: bool = True
) -> LoadedConfig[SectionT]:
    """Load a `kind` from sources already read, of which later ones win. Else like `load_config`.

    Args:
        is_whole: False when a source could not be read, so that keys seem missing which it sets.
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
        first_hand = [(error, path) for error, path in errors if not values.is_derived(path)]
        for error, path in first_hand or errors:
            if error["type"] != "missing" or is_whole:
                findings.refuse(_describe(error, path, values))
        findings.raise_problems()
        raise AssertionError("a source that cannot be read is a problem") from exc
    _refuse_unusable(config, findings)
    if not findings.problems:
        check(config, findings)
    findings.raise_problems()
    return LoadedConfig(config=config, origins=values.origins(), notices=tuple(findings.notices))


def environment_entries(kind: type[Section], environ: Mapping[str, str]) -> list[Entry]:
    """Return variables with our prefix. Those that only other commands know are left out."""

    def is_ours(path: KeyPath) -> bool:
        is_of_dialect = find_key(VfRLConfig, path) is not None
        if kind is VfRLConfig or (is_of_dialect and find_key(kind, path) is None):
            return kind is VfRLConfig and is_of_dialect
        known = [command for command in COMMANDS if find_key(command, path[:1])]
        return not known or kind in known

    return [entry for entry in read_environment(environ) if is_ours(entry.path)]


def _refuse_unknown(kind: type[Section], values: Values, findings: Findings) -> None:
    """Refuse unknown keys and take them out, so that what remains is still validated. A table in place of a value stays."""
    for entry in values.entries():
        path = entry.path
        end = next((end for end in range(1, len(path) + 1) if find_key(kind, path[:end]) is None), None)
        above = find_key(kind, path[: end - 1]) if end else None
        if end is None or above is None or above.shape is not Shape.SECTION:
            continue
        here = path[:end]
        does_suggest = len(findings.problems) < _MAX_SUGGESTIONS
        nearest = (nearest_key(kind, here) or nearest_key(kind, path)) if does_suggest else None
        hint = f"; did you mean {nearest}?" if nearest else "; --help lists the keys"
        findings.refuse(f"unknown key {shorten(dotted(here))} ({entry.origin}){hint}")
        values.remove(path)


def _refuse_unusable(config: Section, findings: Findings, path: KeyPath = ()) -> None:
    """Refuse values of the right type that no machine can work with: impossible paths, integers beyond 64 bits."""
    for name, value in config:
        items = as_list(value) or [value]
        for index, item in enumerate(items):
            here = (*path, name, index) if len(items) > 1 else (*path, name)
            if isinstance(item, Section):
                _refuse_unusable(item, findings, here)
            elif isinstance(item, Path):
                try:
                    usable_path(item, key=str(Key(*here)))
                except ConfigError as exc:
                    findings.refuse(str(exc))
            elif isinstance(item, int) and abs(item) > MAX_INTEGER:
                findings.refuse(f"{Key(*here)} must be a whole number of at most 64 bits, got {describe_integer(item)}")


def _describe(error: ErrorDetails, path: KeyPath, values: Values) -> str:
    key, context = Key(*path), error.get("ctx", {})
    origin = f" ({values.origin(path)})" if values.find(path) is not UNSET else ""
    match error["type"]:
        case "extra_forbidden":
            chooser = (*path[:-1], "type")
            tag = values.find(chooser)
            shown = None if tag is UNSET else tag
            return f'{key} does not apply to {Key(*chooser)} "{shown}"; remove it or change the type{origin}'
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
    """Return the user's key for the location of an error: pydantic adds the chosen type of a section to it."""
    path: KeyPath = ()
    for part in location:
        key = find_key(kind, path)
        if not (key and len(key.sections) > 1 and part in {section.model_fields["type"].default for section in key.sections}):
            path = (*path, part)
    return path
