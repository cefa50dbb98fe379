"""Gives what a run leaves and prints the forms that verifiers' trainer gives it: its console and its `checkpoint-N/`.

`dialects.vf_rl` prints the lines and has the checkpoints written while the run goes on. A run resumes from our own checkpoint of
the same step, not from these.
"""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trivet.checkpoints.run_record import read_run
from trivet.config.layout import MANIFEST, STABLE, RunLayout
from trivet.config.tables import as_table
from trivet.step_directories import list_steps
from trivet.storage.durable import remove_directory, sync_tree, write_json_atomically
from trivet.telemetry.logs import text_line
from trivet.telemetry.metrics import read_metrics
from trivet.weights.manifest import read_manifest

STATE = "trainer_state.json"
MetricsLine = dict[str, float]
"""One line of a metrics file."""
_SUCCESS = re.compile(r".* SUCCESS (?:Step \d+ \|.*|(.*))")
"""A line of a role: a step line, which has another form here, or a line of a sample, whose text is the group."""
_STEP_PARTS = {"reward": "reward/mean", "entropy": "entropy/mean", "importance_ratio": "importance_ratio/mean"}
_DICTIONARY_PARTS = {"loss": "loss/mean", "learning_rate": "optim/lr", "grad_norm": "optim/grad_norm"}


class VfConsole:
    """The console of one run. Every line of the launcher that has no other form in the dialect stays as it is."""

    def __init__(self, layout: RunLayout, *, model: str, env: str, max_steps: int, every: int = 1, since: float = 0.0) -> None:
        """Print nothing yet; later a line every so many steps. An earlier start printed the steps before the unix time `since`."""
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
            port: object = "unknown"
            with suppress(OSError, tomllib.TOMLDecodeError):  # the launcher has written the port that it chose by now
                written = tomllib.loads((self._layout.configs / "inference.toml").read_text())
                port = (as_table(written.get("server")) or {}).get("port", port)
            yield line
            yield f"Loading model {self._model}..."
            yield f"Starting vLLM server on port {port}..."
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
                yield str(_as_transformers(rows[step]))
                parts = ", ".join(
                    f"{label}={rows[step][name]:.4g}" for label, name in _STEP_PARTS.items() if name in rows[step]
                )
                yield f"Step {step}/{self._max_steps}: {parts}"


class VfCheckpoints:
    """The `checkpoint-N/` directories of a run: the published weights of step N, and trainer_state.json."""

    def __init__(self, layout: RunLayout, *, every: int | None, max_steps: int, replaces_run: bool = False) -> None:
        """Note what lies in the directory before the run is started: it is an earlier start's.

        With `every` None, only the last step has a checkpoint. `replaces_run` removes those of the run before, once this one has
        taken the directory.
        """
        self._layout = layout
        self._every = every
        self._max_steps = max_steps
        self._replaces_run = replaces_run
        self._before = read_run(layout)
        self._has_begun = False

    def write_due(self) -> list[Path]:
        """Write the checkpoints whose policy is published and whose step has metrics; return their directories."""
        if not self._has_begun:
            if read_run(self._layout) in (None, self._before):
                return []  # a run that was refused leaves everything as it was
            self._has_begun = True
            for path in self._layout.root.glob("checkpoint-*") if self._replaces_run else ():
                remove_directory(path, marker=STATE)
        steps = (step for step in list_steps(self._layout.weights, marker=STABLE) if step)
        wanted = (step for step in steps if step == self._max_steps or (self._every is not None and step % self._every == 0))
        due = [step for step in wanted if not self._is_written(step)]
        rows = read_steps(self._layout) if due else {}
        return [self._write(step, rows) for step in due if step in rows]

    def _is_written(self, step: int) -> bool:
        """Return whether the checkpoint holds the policy published now; a restart may have replaced that."""
        state = self._layout.root / f"checkpoint-{step}" / STATE
        digest = read_manifest(self._layout.weights_step(step)).digest
        return state.exists() and json.loads(state.read_text()).get("policy_digest") == digest

    def _write(self, step: int, rows: dict[int, MetricsLine]) -> Path:
        final = self._layout.root / f"checkpoint-{step}"
        staging = final.with_name(f".{final.name}.tmp")
        remove_directory(staging)
        staging.mkdir()
        for path in sorted(self._layout.weights_step(step).iterdir()):
            if path.name not in (MANIFEST, STABLE):
                try:
                    os.link(path, staging / path.name)  # a published file is never written to
                except OSError:  # this file system cannot
                    shutil.copy2(path, staging / path.name)
        write_json_atomically(staging / STATE, self._state(step, rows))
        sync_tree(staging)
        remove_directory(final, marker=STATE)
        staging.rename(final)
        return final

    def _state(self, step: int, rows: dict[int, MetricsLine]) -> dict[str, object]:
        """Return the checkpoint's state in the form of `transformers.TrainerState`."""
        history = [
            {
                **_as_transformers(rows[number]),
                **{label: rows[number][name] for label, name in _STEP_PARTS.items() if name in rows[number]},
                "step": number,
            }
            for number in sorted(rows)
            if number <= step
        ]
        return {
            "global_step": step,
            "max_steps": self._max_steps,
            "epoch": rows[step].get("progress/epoch", 0.0),
            "logging_steps": 1,
            "save_steps": self._every or self._max_steps,
            "num_input_tokens_seen": int(rows[step].get("progress/total_tokens", 0)),
            "log_history": history,
            "policy_digest": read_manifest(self._layout.weights_step(step)).digest,
            "is_world_process_zero": True,
            "is_local_process_zero": True,
        }


def read_steps(layout: RunLayout) -> dict[int, MetricsLine]:
    """Return the joined metrics of each step that both roles have finished. Of a repeated step the last row counts.

    Damaged lines are skipped: `trivet check` reports them.
    """
    files = (layout.metrics / "trainer.jsonl", layout.metrics / "orchestrator.jsonl")
    trainer, orchestrator = (
        {row["step"]: row for row in read_metrics(file).rows if isinstance(row.get("time"), (int, float))} for file in files
    )
    return {step: orchestrator[step] | trainer[step] for step in trainer if step in orchestrator}


def _as_transformers(row: MetricsLine) -> dict[str, float]:
    """Return a step as `transformers` logs it: `loss`, `learning_rate`, `grad_norm`, `epoch`."""
    named = {label: float(f"{row[name]:.4g}") for label, name in _DICTIONARY_PARTS.items() if name in row}
    return named | ({"epoch": round(row["progress/epoch"], 4)} if "progress/epoch" in row else {})
