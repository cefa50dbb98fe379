"""Reads the rollouts of a step or of an evaluation, for the page, the command `trivet evals` and programs.

A file may have 100,000 rollouts. So only a `RolloutHead` of each is kept in memory, and a conversation is decoded when it is shown.
"""

import os
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trivet.config.layout import RunLayout
from trivet.errors import ConfigError, MessageRefused
from trivet.storage.durable import DECODE_ERRORS, open_regular
from trivet.telemetry.console import conversation_text
from trivet.transport.recording import GROUPS_FILE, unpack_groups
from trivet.view.files import FileStamp, NotServed, check_inside, read_inside, stamp_of
from trivet.wire.rollouts import Rollout, RolloutRecord, Sample

_KEPT_FILES = 4
"""Number of files whose heads stay in memory, so that a user can page back and forth."""
_PREVIEW_CHARS = 160
"""Limit of characters of a prompt or completion in the list, where it has one line."""


class RolloutHead(msgspec.Struct, kw_only=True):
    """The fields of a rollout by which rollouts are sorted and filtered, and the position of its line in the file."""

    env: str = ""
    example_id: int = 0
    reward: float = 0.0
    advantage: float | None = None
    is_truncated: bool = False
    attempt: int = 0
    """Number of earlier rollouts of the same example in the file."""
    line: int = 0
    """Line of the file, counted from 0."""
    offset: int = 0
    """Bytes before the line."""
    num_bytes: int = 0
    """Length of the line."""


class RolloutFile:
    """The rollouts of one file. The file stays open, so that it can be read even after it was replaced."""

    def __init__(self, path: Path) -> None:
        """Read the heads of all rollouts."""
        self.heads: list[RolloutHead] = []
        self.num_lines = 0
        """Number of complete lines. A last line without a line break is still being written and does not count."""
        try:
            self._file = open_regular(path)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
        weakref.finalize(self, self._file.close)  # closes the file also when nobody calls `close`
        decoder, num_seen, offset = msgspec.json.Decoder(RolloutHead), defaultdict[int, int](int), 0
        for text in self._file:
            if not text.endswith(b"\n"):
                break
            try:
                head = decoder.decode(text)
            except DECODE_ERRORS:
                pass
            else:
                head.line, head.offset, head.num_bytes = self.num_lines, offset, len(text)
                head.attempt = num_seen[head.example_id]
                num_seen[head.example_id] += 1
                self.heads.append(head)
            self.num_lines += 1
            offset += len(text)

    @property
    def num_damaged(self) -> int:
        """Number of lines that are not a rollout."""
        return self.num_lines - len(self.heads)

    def text(self, head: RolloutHead) -> bytes:
        """Return the line of a rollout. May be called on any thread."""
        return os.pread(self._file.fileno(), head.num_bytes, head.offset)

    def row(self, head: RolloutHead) -> RolloutRecord | None:
        """Return a rollout with its conversation; None when its line has another format, or the file was closed."""
        try:
            return msgspec.json.decode(self.text(head), type=RolloutRecord)
        except (OSError, ValueError, *DECODE_ERRORS):
            return None

    def contains(self, head: RolloutHead, text: str) -> bool:
        """Return whether a message or a tool call contains `text`, in upper or lower case."""
        row = self.row(head)
        messages = (*row.prompt, *row.completion) if row is not None else ()
        texts = (f"{message.get('content')}\n{message.get('tool_calls') or ''}" for message in messages)
        return any(text.casefold() in candidate.casefold() for candidate in texts)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPreview:
    """A rollout as it is shown in the page's list."""

    line: int
    """Line of the file, counted from 0: the argument of `RunRollouts.record`."""
    row: RolloutRecord
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some of the rollouts in a file that a query selects. In the JSON that the page gets they are called rows."""

    num_rows: int
    """Number of rollouts that the query selects, on all pages."""
    rows: list[RowPreview]
    envs: list[str]
    num_damaged: int


_SORT_KEYS: dict[str, Callable[[RolloutHead], float]] = {
    "line": lambda head: head.line,
    "reward": lambda head: head.reward,
    "advantage": lambda head: head.advantage or 0.0,
}


class RunRollouts:
    """Reads a run's files of rollouts for the page, and keeps the last few open. Use it from one thread at a time."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._files: OrderedDict[Path, tuple[FileStamp | None, RolloutFile]] = OrderedDict()
        self._recorded: tuple[Path | None, FileStamp | None, list[Rollout]] = (None, None, [])
        """The last file of groups that was read, its stamp then, and its rollouts."""

    def page(
        self, path: Path, *, offset: int = 0, limit: int = 50, sort: str = "line", env: str = "", contains: str = ""
    ) -> Page:
        """Return some rollouts of a file.

        Args:
            sort: `line`, `reward` or `advantage`; with a `-` before it in descending order.
            env: only rollouts of this environment; empty for all.
            contains: text that a message must contain, in upper or lower case.
        """
        file = self._open(path)
        chosen = [head for head in file.heads if env in ("", head.env) and (not contains or file.contains(head, contains))]
        key = _SORT_KEYS.get(sort.removeprefix("-"), _SORT_KEYS["line"])
        chosen.sort(key=key, reverse=sort.startswith("-"))
        shown = [(head, file.row(head)) for head in chosen[offset : offset + limit]]
        rows = [
            RowPreview(line=head.line, row=row, prompt=_text(row.prompt[-1:]), completion=_text(row.completion))
            for head, row in shown
            if row is not None
        ]
        envs = sorted({head.env for head in file.heads if head.env})
        return Page(num_rows=len(chosen), rows=rows, envs=envs, num_damaged=file.num_damaged)

    def record(self, path: Path, line: int) -> dict[str, Any]:
        """Return all fields of one rollout in the file.

        Raises:
            NotServed: the file has no rollout in this line.
        """
        file = self._open(path)
        head = next((head for head in file.heads if head.line == line), None)
        if head is None:
            raise NotServed(f"{path.parent.name} has no rollout {line}; there are {file.num_lines}, counted from 0")
        return msgspec.json.decode(file.text(head))

    def samples(self, directory: Path, line: int) -> list[Sample]:
        """Return the samples of one rollout; empty when their file is missing."""
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

    def _open(self, path: Path) -> RolloutFile:
        real, stamp = check_inside(self._layout.root, path), stamp_of(path)
        if path not in self._files or self._files[path][0] != stamp:
            file = RolloutFile(real)
            if path in self._files:
                self._files[path][1].close()
            self._files[path] = (stamp, file)
        self._files.move_to_end(path)
        while len(self._files) > _KEPT_FILES:
            self._files.popitem(last=False)[1][1].close()
        return self._files[path][1]


def _text(messages: Sequence[dict[str, Any]]) -> str:
    try:
        return conversation_text(messages, max_chars=_PREVIEW_CHARS)
    except (AttributeError, KeyError, TypeError):  # messages of an unknown format are shown as they are
        return str(messages)[:_PREVIEW_CHARS]
