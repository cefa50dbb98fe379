"""Reads the rollouts of a step, or of an evaluation, page by page.

One file's lines are indexed at a time, and decoded when shown.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trivet.config.layout import RunLayout
from trivet.errors import MessageRefused
from trivet.step_directories import list_steps
from trivet.storage.durable import DECODE_ERRORS
from trivet.telemetry.console import conversation_text
from trivet.transport.recorded_groups import GROUPS_FILE, unpack_groups
from trivet.view.files import FileStamp, NotServed, check_inside, read_inside, stamp_of
from trivet.wire.rollouts import Rollout, Sample

_KEPT_FILES = 4
"""Files whose lines stay in memory, for paging back and forth."""
_PREVIEW_CHARS = 160
"""Characters of a prompt or completion in the list: one line on a screen."""


class RolloutRow(msgspec.Struct, kw_only=True):
    """A line of the list: the fields that `rollouts.jsonl` and `results.jsonl` share, and a few of their own."""

    index: int = 0
    reward: float = 0.0
    advantage: float | None = None
    env: str = ""
    group_id: int | None = None
    example_id: int = 0
    num_turns: int = 0
    is_truncated: bool = False
    scores: dict[str, float] = {}
    prompt: list[dict[str, Any]] = []
    completion: list[dict[str, Any]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPreview:
    """A rollout as the list shows it."""

    line: int
    """Line of the file, counted from 0, as `RolloutFiles.record` takes it."""
    row: RolloutRow
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some rows of a file."""

    num_rows: int
    """Rows that the query selects, on all pages."""
    rows: list[RowPreview]
    envs: list[str]
    num_damaged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """Selects and orders the rows of a page."""

    offset: int = 0
    limit: int = 50
    sort: str = "line"
    """`line`, `reward`, `advantage`, each descending with a `-` before it."""
    env: str = ""
    contains: str = ""
    """Text that prompt or completion must contain; case does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexed:
    stamp: FileStamp | None
    lines: list[bytes]
    rows: list[RolloutRow | None]
    """Decoded lines; None for a damaged one."""


_SORT_KEYS: dict[str, Callable[[tuple[int, RolloutRow]], float]] = {
    "line": lambda pair: pair[0],
    "reward": lambda pair: pair[1].reward,
    "advantage": lambda pair: pair[1].advantage or 0.0,
}
_decoder = msgspec.json.Decoder(RolloutRow)


class RolloutFiles:
    """Reads files of rollouts, and keeps the last few. One thread uses it at a time."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._steps: tuple[FileStamp | None, list[int]] = (None, [])
        self._indexed: OrderedDict[Path, _Indexed] = OrderedDict()
        self._recorded: tuple[Path | None, FileStamp | None, list[Rollout]] = (None, None, [])

    @property
    def directory(self) -> Path:
        """The run's directory of rollouts."""
        return self._layout.rollouts

    def steps(self) -> list[int]:
        """Return the steps whose rollouts are there, ascending."""
        stamp = stamp_of(self.directory)
        if stamp is None:
            return []
        if stamp != self._steps[0]:
            self._steps = (stamp, list(list_steps(self.directory)))
        return self._steps[1]

    def page(self, path: Path, query: PageQuery) -> Page:
        """Return the rows that the query selects.

        Raises:
            NotServed: the run has no such file.
        """
        indexed = self._index(path)
        rows = [(line, row) for line, row in enumerate(indexed.rows) if row is not None]
        chosen = [
            (line, row)
            for line, row in rows
            if (not query.env or row.env == query.env) and (not query.contains or _contains(row, query.contains.casefold()))
        ]
        name, is_descending = query.sort.removeprefix("-"), query.sort.startswith("-")
        chosen.sort(key=_SORT_KEYS.get(name, _SORT_KEYS["line"]), reverse=is_descending)
        return Page(
            num_rows=len(chosen),
            rows=[_preview(line, row) for line, row in chosen[query.offset : query.offset + query.limit]],
            envs=sorted({row.env for _, row in rows if row.env}),
            num_damaged=len(indexed.rows) - len(rows),
        )

    def record(self, path: Path, line: int) -> dict[str, Any]:
        """Return everything that the file says of one rollout.

        Raises:
            NotServed: there is no such line, or it is damaged.
        """
        indexed = self._index(path)
        if not 0 <= line < len(indexed.rows) or indexed.rows[line] is None:
            raise NotServed(f"{path.parent.name} has no rollout {line}; there are {len(indexed.rows)}, counted from 0")
        return msgspec.json.decode(indexed.lines[line])

    def samples(self, directory: Path, line: int) -> list[Sample]:
        """Return the samples of one rollout; none where their file is missing, as in runs of earlier versions.

        Raises:
            NotServed: the file cannot be read.
        """
        path = directory / GROUPS_FILE
        stamp = stamp_of(path)
        if stamp is None:
            return []
        if (path, stamp) != self._recorded[:2]:
            try:
                recorded = unpack_groups(read_inside(self._layout.root, path))
            except MessageRefused as exc:
                raise NotServed(f"{GROUPS_FILE} cannot be read: {exc}") from exc
            self._recorded = (path, stamp, [rollout for group in recorded.groups for rollout in group.rollouts])
        rollouts = self._recorded[2]
        return rollouts[line].samples if line < len(rollouts) else []

    def _index(self, path: Path) -> _Indexed:
        check_inside(self._layout.root, path)
        stamp = stamp_of(path)
        known = self._indexed.get(path)
        if known is None or known.stamp != stamp:
            content = read_inside(self._layout.root, path)
            lines = content.split(b"\n")[:-1]  # what follows the last line break is not finished
            known = _Indexed(stamp=stamp, lines=lines, rows=[_decode(line) for line in lines])
            self._indexed[path] = known
        self._indexed.move_to_end(path)
        while len(self._indexed) > _KEPT_FILES:
            self._indexed.popitem(last=False)
        return known


def _decode(line: bytes) -> RolloutRow | None:
    try:
        return _decoder.decode(line)
    except DECODE_ERRORS:
        return None


def _contains(row: RolloutRow, folded: str) -> bool:
    return any(folded in str(message.get("content", "")).casefold() for message in (*row.prompt, *row.completion))


def _preview(line: int, row: RolloutRow) -> RowPreview:
    return RowPreview(line=line, row=row, prompt=_text(row.prompt[-1:]), completion=_text(row.completion))


def _text(messages: Sequence[dict[str, Any]]) -> str:
    try:
        return conversation_text(messages, max_chars=_PREVIEW_CHARS)
    except (AttributeError, KeyError, TypeError):  # messages of a form that we do not know are shown as they are
        return str(messages)[:_PREVIEW_CHARS]
