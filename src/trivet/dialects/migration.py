"""Turns a configuration in the keys of others into one of ours, with a comment at each line that has another name or value here.

Reads no files and prints nothing; `trivet migrate` does. Names of others are those of `config.spellings`: what a command accepts
with a notice becomes a line with a comment, and what it refuses is listed above the first line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from trivet.config.dump import literal, toml_key
from trivet.config.findings import Findings
from trivet.config.keys import KeyPath, Shape, dotted, find_key, nearest_key
from trivet.config.load import load_sources
from trivet.config.reference import EXAMPLES
from trivet.config.schema.base import Section
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.vf_rl import VfRLConfig
from trivet.config.spellings import GPU_COUNTS, current_path, use_current_names, use_underscores
from trivet.config.tables import as_list, as_table
from trivet.config.values import Entry, flatten
from trivet.dialects.vf_translation import translate_entries
from trivet.errors import ConfigError

_SOURCES = "orchestrator.train.source"
"""Environments as prime-rl writes them since mid-2026."""
_SINCE_2026 = ("orchestrator.train", "orchestrator.group_size", "orchestrator.algo", "inference.vllm", "deployment", "resume")
"""Keys of prime-rl that show a file of the time when its default loss was the one that is called `dppo` here."""


@dataclass(frozen=True, slots=True)
class MigratedKey:
    """A key of the new file."""

    path: KeyPath
    value: object
    comment: str = ""


@dataclass(slots=True)
class Migration:
    """A configuration of ours, and what was lost on the way."""

    kind: type[Section]
    lines: list[MigratedKey]
    dropped: list[str] = field(default_factory=list[str])
    """A text for each key that has no counterpart: the key, its value and the reason."""
    problems: list[str] = field(default_factory=list[str])
    """What keeps the result from being loaded. Only a person can decide it."""

    def to_toml(self) -> str:
        """Return the new file."""
        head = [f"# for `uv run {EXAMPLES[self.kind][0]}`"]
        head += [f"# does not load yet: {problem}" for problem in self.problems]
        head += [f"# dropped: {text}" for text in self.dropped]
        tree: dict[str, Any] = {}
        for line in self.lines:
            table = tree
            for part in map(str, line.path[:-1]):
                if isinstance(table.get(part), MigratedKey):  # an empty table that later lines fill
                    del table[part]
                table = table.setdefault(part, {})
            table.setdefault(str(line.path[-1]), line)
        return "\n".join([*head, *_table_lines(tree, ())]) + "\n"


def migrate(files: Sequence[Entry]) -> Migration:
    """Return the configuration for a file of prime-rl or of verifiers' trainer.

    Args:
        files: the tables of the file, after those of the files from which it inherits; see `config.sources.read_toml`.
    """
    kind = _choose_kind(files)
    entries: dict[KeyPath, Entry] = {}
    for file in files:
        whole = use_underscores(kind, replace(file, origin=""), Findings())
        entries |= {part.path: part for entry in flatten(whole) for part in _list_parts(kind, entry)}
    found = _with_problems(_use_own_names(kind, list(entries.values())))
    return found if kind is not VfRLConfig else translate(found)


def translate(found: Migration, run_lines: Sequence[MigratedKey] = ()) -> Migration:
    """Return the run that a configuration of `vf-rl` describes. Its defaults are written out where ours differ.

    Args:
        run_lines: lines of the run that replace those of the dialect.
    """
    if found.problems:
        raise ConfigError("the file cannot be read as one of vf-rl: " + "; ".join(found.problems))
    comments = {dotted(line.path): line.comment for line in found.lines}
    loaded = load_sources(VfRLConfig, [_entries(found)], Findings())
    lines = {line.path: line for line in run_lines}
    takes_loss = any(path[:2] == ("trainer", "loss") for path in lines)
    for entry, source in translate_entries(loaded):
        if takes_loss and entry.path[:3] in (("trainer", "loss", "token_mask_low"), ("trainer", "loss", "token_mask_high")):
            continue
        is_given = source in loaded.origins
        comment = comments.get(source) or (source if is_given else f"{source}, a default")
        for part in (inner for item in flatten(entry) for inner in _list_parts(RLConfig, item)):
            if is_given or not _is_default(part):
                lines.setdefault(part.path, MigratedKey(part.path, part.value, comment))
    run = _with_problems(Migration(RLConfig, list(lines.values()), found.dropped))
    return replace(run, dropped=[*run.dropped, *(f"nothing, but note: {notice}" for notice in loaded.notices)])


def _is_default(entry: Entry) -> bool:
    """Return whether a run without the key has this value too. A key of a section that is off by default turns the section on."""
    keys = [find_key(RLConfig, entry.path[:end]) for end in range(1, len(entry.path) + 1)]
    fields = [key.field for key in keys if key is not None and key.field is not None]
    *sections, value = [field.get_default(call_default_factory=True) for field in fields]
    return None not in sections and value == entry.value


def _choose_kind(files: Sequence[Entry]) -> type[Section]:
    """Return the configuration that has most of the keys, also in their older names."""
    paths = [entry.path for file in files for entry in flatten(file)]

    def num_known(kind: type[Section]) -> int:
        return sum(find_key(kind, current_path(kind, path)) is not None for path in paths)

    return max(EXAMPLES, key=num_known)


def _use_own_names(kind: type[Section], entries: Sequence[Entry]) -> Migration:
    """Give each key its name here, and drop those that have none."""
    found = Migration(kind, [])
    counts = [entry for entry in entries if kind is RLConfig and dotted(entry.path) in GPU_COUNTS]
    for group in [*([entry] for entry in entries if entry not in counts), *([counts] if counts else [])]:
        findings, old = Findings(), " and ".join(dotted(entry.path) for entry in group)
        current = use_current_names(kind, group, findings)
        reasons = [text.replace(" ()", "").removeprefix(f"{old} ") for text in (*findings.problems, *findings.notices)]
        known = [entry for entry in current if find_key(kind, entry.path) is not None]
        for entry in known:
            is_same = len(group) == 1 and entry.path == group[0].path
            found.lines.append(MigratedKey(entry.path, entry.value, entry.origin or ("" if is_same else f"was {old}")))
        if not known:
            nearest = nearest_key(kind, group[0].path) if current else None
            unknown = f"there is no such key here{f'; {nearest} is like it' if nearest else ''}"
            found.dropped.append(f"{old} = {literal(group[0].value)}: {'; '.join(reasons) or unknown}")
    if kind is RLConfig:
        _name_loss(found, {dotted(entry.path) for entry in entries})
    return found


def _name_loss(found: Migration, old_keys: set[str]) -> None:
    """Add the type of the loss if the file has, or leaves out, the default loss that prime-rl has had since March 2026."""
    path = ("trainer", "loss", "type")
    named = next((line for line in found.lines if line.path == path), None)
    has_masks = any(name.startswith("trainer.loss.dppo_mask") for name in old_keys)
    is_recent = any(name == key or name.startswith(f"{key}.") for name in old_keys for key in _SINCE_2026)
    has_loss = any(name.startswith("trainer.loss.") for name in old_keys)
    if (has_masks or (is_recent and not has_loss)) and (named is None or named.value == "default"):
        found.lines = [line for line in found.lines if line is not named]
        found.lines.append(MigratedKey(path, "dppo", "the default of prime-rl since March 2026 is called so here"))


def _with_problems(found: Migration) -> Migration:
    """Add what keeps the lines from being loaded."""
    try:
        load_sources(found.kind, [_entries(found)], Findings())
    except ConfigError as exc:
        first, *others = str(exc).split("\n- ")
        return replace(found, problems=others or [first])
    return found


def _entries(found: Migration) -> list[Entry]:
    return [Entry(path=line.path, value=line.value, origin=line.comment or "the file") for line in found.lines]


def _list_parts(kind: type[Section], entry: Entry) -> Iterator[Entry]:
    """Yield an entry for each key in a list of sections, such as `orchestrator.env.0.id`; the entry itself for another key."""
    if kind is RLConfig and dotted(entry.path) == _SOURCES:
        yield from _environments(entry)
        return
    key = find_key(kind, current_path(kind, entry.path))
    rows = as_list(entry.value) or ([entry.value] if as_table(entry.value) else [])
    if key is None or key.shape is not Shape.SECTION_LIST or not rows:
        yield entry
        return
    for index, row in enumerate(rows):
        yield from flatten(replace(entry, path=(*entry.path, str(index)), value=row))


def _environments(entry: Entry) -> Iterator[Entry]:
    """Yield the keys of [[orchestrator.env]] for prime-rl's sources: the task set of each is an environment here."""
    for index, row in enumerate(as_list(entry.value) or []):
        source = as_table(row) or {}
        env = as_table(source.pop("env", None)) or source
        tasks = dict(as_table(env.get("taskset")) or {})
        at = ("orchestrator", "env", str(index))
        for name, value in {"id": tasks.pop("id", env.get("id")), "name": source.pop("name", None)}.items():
            if value is not None:
                yield Entry(path=(*at, name), value=value, origin=f"was {_SOURCES}")
        yield from flatten(Entry(path=(*at, "args"), value=tasks, origin=f"was {_SOURCES}.taskset")) if tasks else ()
        rest = {name: value for part in (env, source) for name, value in part.items() if name not in ("taskset", "id", "env")}
        yield from flatten(Entry(path=(*_SOURCES.split("."), str(index)), value=rest, origin="")) if rest else ()


def _table_lines(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a table: its values, then the tables in it."""
    for name, item in tree.items():
        if isinstance(item, MigratedKey):
            comment = f"  # {item.comment}" if item.comment else ""
            yield f"{toml_key(name)} = {literal(item.value)}{comment}"
    for name, item in tree.items():
        if isinstance(item, MigratedKey):
            continue
        inner, table = (*path, name), cast("dict[str, Any]", item)
        header = ".".join(map(toml_key, inner))
        if all(part.isdecimal() for part in table):
            for row in table.values():
                yield from ("", f"[[{header}]]", *_table_lines(row, inner))
        else:
            has_values = any(isinstance(value, MigratedKey) for value in table.values())
            yield from (*(("", f"[{header}]") if has_values else ()), *_table_lines(table, inner))
