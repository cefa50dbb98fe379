"""Makes the lines that `vf-rl` prints: those of verifiers' trainer, from the launcher's output and the roles' metrics.

Used by `dialects.vf_rl`, which prints them. Reads files and changes none.
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.config.tables import as_table
from trivet.launcher.logs import LogFollower
from trivet.telemetry.logs import text_line
from trivet.telemetry.metrics import read_metrics

MetricsLine = dict[str, float]
"""One line of a metrics file."""

_STEP_LINE = re.compile(r" SUCCESS Step \d+ \|")
_OTHER_SUCCESS = re.compile(r".* SUCCESS (.*)")
_STARTED = re.compile(r" rl started inference ")
_READY = re.compile(r" rl inference ready ")
_STEP_PARTS = (("reward", "reward/mean"), ("entropy", "entropy/mean"), ("importance_ratio", "importance_ratio/mean"))
_DICTIONARY_PARTS = (("loss", "loss/mean"), ("learning_rate", "optim/lr"), ("grad_norm", "optim/grad_norm"))


class VfConsole:
    """The console of one run.

    >>> console = VfConsole(layout, model="models/tiny", env="reverse-text", max_steps=100)
    >>> for line in console.translate("12:00:00 rl inference ready url=…"):
    ...     print(line)
    >>> for line in console.step_lines():
    ...     print(line)
    """

    def __init__(self, layout: RunLayout, *, model: str, env: str, max_steps: int, every: int = 1, since: float = 0.0) -> None:
        """Print nothing yet.

        Args:
            every: steps between lines.
            since: unix seconds; steps that were finished before are another start's, which printed them.
        """
        self._layout = layout
        self._model = model
        self._env = env
        self._max_steps = max_steps
        self._every = every
        self._since = since
        self._shown = 0
        self._reported_damage: set[str] = set()
        """Lines about damaged files that were printed; each is printed once."""

    def translate(self, line: str) -> Iterator[str]:
        """Yield what is printed for a line of the launcher. Its step lines have another form here; the rest stays."""
        line = text_line(line)
        if _STARTED.search(line):
            yield line
            yield f"Loading model {self._model}..."
            yield f"Starting vLLM server on port {self._port()}..."
            yield "Waiting for vLLM server to be ready..."
        elif _READY.search(line):
            yield "vLLM server is ready"
            yield f"Loading environment {self._env}..."
        elif found := None if _STEP_LINE.search(line) else _OTHER_SUCCESS.match(line):
            yield found[1]
        elif not _STEP_LINE.search(line):
            yield line

    def step_lines(self) -> Iterator[str]:
        """Yield the lines of steps that both roles have finished since the last call."""
        damaged: list[str] = []
        rows = read_steps(self._layout, on_damaged=lambda path, count: damaged.append(f"{path}: {count} damaged lines skipped"))
        new = [line for line in damaged if line not in self._reported_damage]
        self._reported_damage.update(new)
        yield from new
        for step in sorted(step for step in rows if step > self._shown and rows[step]["time"] >= self._since):
            self._shown = step
            if step % self._every == 0 or step == self._max_steps:
                yield str(dictionary_of(rows[step]))
                parts = ", ".join(f"{label}={rows[step][name]:.4g}" for label, name in _STEP_PARTS if name in rows[step])
                yield f"Step {step}/{self._max_steps}: {parts}"

    def _port(self) -> object:
        try:
            written = tomllib.loads((self._layout.configs / "inference.toml").read_text())
        except (OSError, tomllib.TOMLDecodeError):
            return "unknown"
        return (as_table(written.get("server")) or {}).get("port", "unknown")


def dictionary_of(row: MetricsLine) -> dict[str, float]:
    """Return a step as `transformers` logs it: `loss`, `learning_rate`, `grad_norm`, `epoch`."""
    named = {label: float(f"{row[name]:.4g}") for label, name in _DICTIONARY_PARTS if name in row}
    return named | ({"epoch": round(row["progress/epoch"], 4)} if "progress/epoch" in row else {})


def read_steps(
    layout: RunLayout, *, on_damaged: Callable[[Path, int], None] = lambda _path, _count: None
) -> dict[int, MetricsLine]:
    """Return the metrics of each step that both roles have finished, joined. Of a step that was repeated the last counts.

    Args:
        on_damaged: is told of a file with damaged lines, which are skipped, and of their number.
    """
    trainer, orchestrator = (_read_rows(layout.metrics / f"{role}.jsonl", on_damaged) for role in ("trainer", "orchestrator"))
    return {step: orchestrator[step] | trainer[step] for step in trainer if step in orchestrator}


def _read_rows(path: Path, on_damaged: Callable[[Path, int], None]) -> dict[int, MetricsLine]:
    found = read_metrics(path)
    if found.num_damaged:
        on_damaged(path, found.num_damaged)
    return {row["step"]: row for row in found.rows if isinstance(row.get("time"), (int, float))}


def follow(path: Path, *, show: Callable[[str], None], console: VfConsole) -> Callable[[], None]:
    """Return a function that shows what the launcher printed, and the steps that were finished, since its last call."""
    follower = LogFollower(path, offset=0)

    def show_new_lines() -> None:
        for line in follower.read_lines():
            for translated in console.translate(line):
                show(translated)
        for line in console.step_lines():
            show(line)

    return show_new_lines
