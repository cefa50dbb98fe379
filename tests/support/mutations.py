"""Damages a copy of a run in one random place, and reports whether the checker notices.

A mutation counts when it changes what the run says of itself. It does not count, and `judge` returns None, when the bytes stay the
same; when a bit of a file of JSON flips and its values stay the same; or when all that would change is what run.json says of the
launcher's process: its id and when it started. Nothing else is left out: whatever the checker misses is a miss. Files are those
that a run is proven from (`EXAMINED` and run.json). No file is added outside these directories, where anyone may keep notes.
"""

import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from trivet.cli.main import main
from trivet.config.layout import COMMITTED, STABLE, RunLayout

KINDS = ("drop", "duplicate", "swap", "change", "move", "truncate", "flip")
EXAMINED = ("weights", "checkpoints", "rollouts")
"""Directories of the files that prove a run, besides events.jsonl and run.json."""
_OF_RUN_FILE = ("id", "attempt")
"""Fields of run.json about the run. The rest is the launcher's process and its start."""
_SHARE_OF_EVENTS = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    kind: str
    where: str
    """Either `events` or `files`."""
    what: str
    is_found: bool
    said: str


def judge(directory: Path, rng: random.Random, *, kind: str) -> Outcome | None:
    """Damage a copy of the run in `directory` and check it. None when the mutation changed nothing.

    The copy shares its files with the original; what is damaged is written anew.
    """
    copy = directory.with_name(f"{directory.name}.mutated")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy, copy_function=os.link)
    try:
        is_event = rng.random() < _SHARE_OF_EVENTS
        mutate = _mutate_events if is_event else _mutate_files
        what = mutate(RunLayout(copy), rng, kind)
        if what is None:
            return None
        said = StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            is_found = _is_found(copy)
        return Outcome(kind=kind, where="events" if is_event else "files", what=what, is_found=is_found, said=said.getvalue())
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def judge_many(directories: Sequence[Path], *, count: int, seed: int) -> list[Outcome]:
    """Judge `count` mutations that changed a run, as many of each kind, each of a run drawn from `directories`."""
    rng = random.Random(seed)
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        kind = KINDS[len(outcomes) % len(KINDS)]
        outcome = judge(rng.choice(directories), rng, kind=kind)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the share that was found, by kind and place."""
    names = sorted({(outcome.where, outcome.kind) for outcome in outcomes})
    return {
        f"{where}/{kind}": _share([item for item in outcomes if (item.where, item.kind) == (where, kind)])
        for where, kind in names
    }


def _is_found(directory: Path) -> bool:
    try:
        return main(["check", str(directory)]) == 1
    except Exception:  # noqa: BLE001  a traceback finds nothing
        traceback.print_exc()
        return False


def _share(outcomes: Sequence[Outcome]) -> float:
    return round(sum(outcome.is_found for outcome in outcomes) / len(outcomes), 4)


def _rewrite(path: Path, content: bytes) -> None:
    """Write a new file, because the original shares the old bytes."""
    path.unlink()
    path.write_bytes(content)


def _mutate_events(layout: RunLayout, rng: random.Random, kind: str) -> str | None:
    before = layout.events.read_bytes()
    lines = before.splitlines(keepends=True)
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    what = f"line {place + 1}: {lines[place][:100]!r}"
    match kind:
        case "drop":
            del lines[place]
        case "duplicate":
            lines.insert(rng.choice((place, other)), lines[place])
        case "swap":
            lines[place], lines[other] = lines[other], lines[place]
            what += f" with line {other + 1}"
        case "move":
            lines.insert(other, lines.pop(place))
            what += f" to line {other + 1}"
        case "change":
            values = json.loads(lines[place])
            name = rng.choice(sorted(values))
            values[name] = _other_value(values[name], rng)
            lines[place] = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
            what += f", {name} = {values[name]!r}"
        case "truncate":
            size = rng.randrange(len(before))
            lines, what = [before[:size]], f"to {size} of {len(before)} bytes"
        case _:
            lines[place] = _flip(lines[place], rng)
            what += f" to {lines[place][:100]!r}"
    after = b"".join(lines)
    if after == before:
        return None
    _rewrite(layout.events, after)
    return f"events.jsonl, {what}"


def _mutate_files(layout: RunLayout, rng: random.Random, kind: str) -> str | None:
    files = [path for name in EXAMINED for path in sorted((layout.root / name).rglob("*")) if path.is_file()]
    files = [path for path in files if path.parent != layout.readers and not _is_unpublished(layout, path)]
    files += [layout.run_file] if layout.run_file.exists() else []
    path, other = rng.choice(files), rng.choice(files)
    content, name = path.read_bytes(), path.relative_to(layout.root).as_posix()
    match kind:
        case "drop":
            path.unlink()
        case "duplicate":
            if path == layout.run_file:
                return None
            _copy(path, rng)
        case "swap":
            if content == other.read_bytes():
                return None
            _rewrite(path, other.read_bytes())
            _rewrite(other, content)
            name += f" with {other.relative_to(layout.root)}"
        case "move":
            places = [path.with_name(f"{path.name}.moved")]
            if path != layout.run_file:
                places.append(path.parent.with_name("step_77") / path.name)
            target = rng.choice(places)
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
            name += f" to {target.relative_to(layout.root)}"
        case "change":
            changed = _change_json(path, content, rng)
            if changed is None:
                return None
            name += f": {changed}"
        case "truncate":
            if not content:
                return None
            _rewrite(path, content[: rng.randrange(len(content))])
        case _:
            if not content:
                return None
            flipped = _flip(content, rng)
            if _meaning(path, flipped) == _meaning(path, content):
                return None
            _rewrite(path, flipped)
    return name


def _is_unpublished(layout: RunLayout, path: Path) -> bool:
    """Return whether `path` belongs to a policy that a kill left without STABLE. Nobody may read it, and a resume removes
    it."""
    return path.parent.parent == layout.weights and not (path.parent / STABLE).exists()


def _copy(path: Path, rng: random.Random) -> None:
    """Copy the file under another name next to it, or its step under another number."""
    target = path.parent.with_name("step_77")
    if rng.random() < 0.5 or path.name not in (COMMITTED, STABLE):
        shutil.copyfile(path, path.with_name(f"copy_of_{path.name}"))
    else:
        shutil.copytree(path.parent, target)


def _change_json(path: Path, content: bytes, rng: random.Random) -> str | None:
    """Change one value of a JSON file, or of one line of a JSONL file."""
    if path.suffix == ".jsonl":
        lines = content.splitlines(keepends=True)
        place = rng.randrange(len(lines))
        values = json.loads(lines[place])
        name = rng.choice(sorted(values))
        values[name] = _other_value(values[name], rng)
        lines[place] = json.dumps(values).encode() + b"\n"
        _rewrite(path, b"".join(lines))
        return f"line {place + 1}, {name}"
    try:
        values = json.loads(content)
    except ValueError:
        return None
    if not isinstance(values, dict) or not values:
        return None
    names = _OF_RUN_FILE if path.name == "run.json" else sorted(values)
    name = rng.choice(names)
    values[name] = _other_value(values[name], rng)
    _rewrite(path, json.dumps(values, indent=1).encode())
    return f"{name} = {values[name]!r}"[:200]


def _meaning(path: Path, content: bytes) -> object:
    """Return the file's content: its values for JSON, else its bytes."""
    try:
        values = json.loads(content)
    except ValueError:
        return content
    if path.name == "run.json" and isinstance(values, dict):
        return {name: values.get(name) for name in _OF_RUN_FILE}
    return json.dumps(values, sort_keys=True)


def _flip(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _other_value(value: Any, rng: random.Random) -> Any:
    changes: list[Callable[[Any], Any]]
    match value:
        case bool():
            return not value
        case int():
            changes = [lambda old: old + 1, lambda old: old - 1, lambda old: old + rng.randrange(2, 100)]
        case float():
            changes = [lambda old: old + 1.0, lambda old: old * 1.001 + 0.001]
        case str():
            changes = [lambda old: f"{old}x", lambda old: old[:-1] or "y"]
        case list():
            changes = [lambda old: [*old, old[0] if old else 0], lambda old: old[1:] or [0, 0]]
        case dict():
            changes = [lambda old: {**old, "added": 1}, lambda old: dict(list(old.items())[1:]) or {"added": 1}]
        case _:
            return 1
    return rng.choice(changes)(value)
