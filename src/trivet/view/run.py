"""Holds the readers of one viewed run, with one lock for all of them, because requests are answered in several threads."""

import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trivet.config.dump import literal
from trivet.config.layout import RunLayout
from trivet.config.masking import HIDDEN, mask_table
from trivet.errors import ConfigError
from trivet.step_directories import list_steps
from trivet.view.evaluations import Evaluations
from trivet.view.files import NotServed, read_inside
from trivet.view.metrics import ALWAYS_READ, RunMetrics
from trivet.view.rollouts import RunRollouts
from trivet.view.status import StatusClock
from trivet.view.timeline import NoteReader

_TOKENIZER = "tokenizer.json"
_REPLACEMENT_CHARACTER = "\ufffd"
"""A tokenizer decodes an incomplete character to this."""
_MAX_TOKENS_OF_CHARACTER = 8
"""Limit of tokens that form one character. If more tokens still decode to an incomplete one, it is shown as it is."""


class TokenText:
    """Splits text into the pieces of its tokens, with the run's tokenizer. The tokenizer is loaded once it exists."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._tokenizer: Tokenizer | None = None

    def pieces(self, token_ids: Sequence[int]) -> list[str] | None:
        """Return one text for each token; None while the run has no tokenizer."""
        newest_first = [path / _TOKENIZER for path in reversed(list_steps(self._layout.weights).values())]
        for path in newest_first if self._tokenizer is None else []:
            with suppress(Exception):  # tokenizers raises the plain class for a file that it cannot read
                self._tokenizer = Tokenizer.from_buffer(read_inside(self._layout.root, path))
                break
        return None if self._tokenizer is None else split_text(self._tokenizer, token_ids)


def split_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. When several tokens form one character, the last of them gets it.

    `start` is where the decoded text begins: at the tokens of the last piece, which ends before `shown`.
    """
    pieces: list[str] = []
    start = shown = 0
    before = ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(list(token_ids[start:end]), skip_special_tokens=False)
        if text.endswith(_REPLACEMENT_CHARACTER) and end - shown < _MAX_TOKENS_OF_CHARACTER and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :] if text.startswith(before) else tokenizer.decode([token_ids[end - 1]]))
        # The tokens of the last piece are decoded together with the next: some tokenizers drop a space at the start of a text.
        start, shown = shown, end
        before = tokenizer.decode(list(token_ids[start:end]), skip_special_tokens=False)
    return pieces


class ViewedRun:
    """One run that is viewed, with the readers of its files."""

    def __init__(self, layout: RunLayout, *, name: str) -> None:
        self.layout, self.name = layout, name
        self.lock = threading.Lock()
        """Must be held while any of the following attributes is used."""
        self.metrics = RunMetrics(layout)
        self.rollouts = RunRollouts(layout)
        self.token_text = TokenText(layout)
        self.evaluations = Evaluations(layout.evals)
        self.notes = NoteReader(layout)
        self.clock = StatusClock()
        """The clock by which the age of the run's status is computed."""

    def warm_up(self) -> None:
        """Read the metrics that the first page shows."""
        with self.lock:
            self.metrics.refresh(ALWAYS_READ)


def open_run(directory: Path) -> RunLayout:
    """Return the layout of the run in `directory`.

    Raises:
        ConfigError: there is no run.
    """
    layout = RunLayout(directory)
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is no directory; give a run's output_dir")
    signs = [layout.status, layout.run_file, layout.events, layout.metrics, layout.reports, layout.evals]
    if not any(path.exists() for path in signs):
        records = [path for pattern in ("*/run.json", "*/*/run.json") for path in directory.glob(pattern)]
        examples = f", for example {' or '.join(str(path.parent) for path in sorted(records)[:3])}" if records else ""
        raise ConfigError(
            f"{str(directory)!r} holds no run: none of {', '.join(path.name for path in signs)} is there; "
            f"give a run's output_dir{examples}"
        )
    return layout


def name_runs(directories: list[Path]) -> list[str]:
    """Name each run by the last parts of its path: as few as make the names different, and at least two, as many are called
    `run`.
    """
    paths = [path.resolve().parts for path in directories]
    depth = 2
    while len({parts[-depth:] for parts in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(parts[-depth:]).removeprefix("//") for parts in paths]


def read_config(layout: RunLayout, role: str) -> dict[str, Any]:
    """Return the configuration of a role as it is in its file; empty if there is no readable one."""
    try:
        return tomllib.loads((layout.configs / f"{role}.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def read_configs(layout: RunLayout) -> dict[str, dict[str, str]]:
    """Return the configuration of each role: the value of each key in TOML notation. Values that may be secret are left out.

    For a file that cannot be read there is one key `(fault)` with the reason.
    """
    if not layout.configs.is_dir():
        return {}
    found: dict[str, dict[str, str]] = {}
    for path in sorted(layout.configs.glob("*.toml")):
        try:
            found[path.stem] = dict(_flatten(mask_table(tomllib.loads(read_inside(layout.root, path).decode("utf-8")))))
        except (NotServed, ValueError, RecursionError) as exc:
            found[path.stem] = {"(fault)": f"cannot be read: {exc}"}
    return found


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                yield from _flatten(item, f"{name}[{index}].")
        else:
            yield name, HIDDEN if value == HIDDEN else literal(value)
