"""Makes the lines that `vf-rl` prints as verifiers' trainer does: the stages of the start, each step, and its sample.

Used by `dialects.vf_rl`, which prints them. Every other line of the launcher stays as it is. Reads files and changes none.
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

_SUCCESS = re.compile(r".* SUCCESS (?:Step \d+ \|.*|(.*))")
"""A line of a role: a step line, which has another form here, or a line of a sample, whose text is the group."""
_STEP_PARTS = (("reward", "reward/mean"), ("entropy", "entropy/mean"), ("importance_ratio", "importance_ratio/mean"))
_DICTIONARY_PARTS = (("loss", "loss/mean"), ("learning_rate", "optim/lr"), ("grad_norm", "optim/grad_norm"))


class VfConsole:
    """The console of one run."""

    def __init__(self, layout: RunLayout, *, model: str, env: str, max_steps: int, every: int = 1, since: float = 0.0) -> None:
        """Print nothing yet.

        Args:
            every: steps between lines.
            since: unix seconds; an earlier start of the run printed the steps that were finished before.
        """
        self._layout = layout
        self._model = model
        self._env = env
        self._max_steps = max_steps
        self._every = every
        self._since = since
        self._last_step = 0

    def translate(self, line: str) -> Iterator[str]:
        """Yield what is printed for a line of the launcher."""
        line = text_line(line)
        if " rl started inference " in line:
            yield line
            yield f"Loading model {self._model}..."
            yield f"Starting vLLM server on port {self._port()}..."
            yield "Waiting for vLLM server to be ready..."
        elif " rl inference ready " in line:
            yield "vLLM server is ready"
            yield f"Loading environment {self._env}..."
        elif (found := _SUCCESS.match(line)) is None:
            yield line
        elif found[1]:
            yield found[1]

    def step_lines(self) -> Iterator[str]:
        """Yield the lines of steps that both roles have finished since the last call."""
        rows = read_steps(self._layout)
        for step in sorted(step for step in rows if step > self._last_step and rows[step]["time"] >= self._since):
            self._last_step = step
            if step % self._every == 0 or step == self._max_steps:
                yield str(dictionary_of(rows[step]))
                parts = ", ".join(f"{label}={rows[step][name]:.4g}" for label, name in _STEP_PARTS if name in rows[step])
                yield f"Step {step}/{self._max_steps}: {parts}"

    def _port(self) -> object:
        """Return the port that the launcher chose, which it has written by now."""
        try:
            written = tomllib.loads((self._layout.configs / "inference.toml").read_text())
        except (OSError, tomllib.TOMLDecodeError):
            return "unknown"
        return (as_table(written.get("server")) or {}).get("port", "unknown")


def dictionary_of(row: MetricsLine) -> dict[str, float]:
    """Return a step as `transformers` logs it: `loss`, `learning_rate`, `grad_norm`, `epoch`."""
    named = {label: float(f"{row[name]:.4g}") for label, name in _DICTIONARY_PARTS if name in row}
    return named | ({"epoch": round(row["progress/epoch"], 4)} if "progress/epoch" in row else {})


def read_steps(layout: RunLayout) -> dict[int, MetricsLine]:
    """Return the joined metrics of each step that both roles have finished. Of a repeated step the last row counts.

    Damaged lines are skipped: `trivet check` reports them.
    """
    trainer, orchestrator = (_read_rows(layout.metrics / f"{role}.jsonl") for role in ("trainer", "orchestrator"))
    return {step: orchestrator[step] | trainer[step] for step in trainer if step in orchestrator}


def _read_rows(path: Path) -> dict[int, MetricsLine]:
    return {row["step"]: row for row in read_metrics(path).rows if isinstance(row.get("time"), (int, float))}


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
