"""Converts the output of a run to the forms of verifiers' trainer: its console lines and its directories `checkpoint-N/`.

During the run, `dialects.vf_rl` prints the lines and calls `VfCheckpoints.write_due`. The directories are for other programs: a run
resumes from trivet's own checkpoint of the same step.
"""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trivet.checkpoints.run_record import read_run
from trivet.config.layout import NOT_OF_POLICY, STABLE, RunLayout
from trivet.config.tables import as_table
from trivet.step_directories import list_steps
from trivet.storage.durable import remove_directory, sync_tree, write_json_atomically
from trivet.telemetry.logs import text_line
from trivet.telemetry.metrics import read_metrics
from trivet.weights.manifest import read_manifest

STATE = "trainer_state.json"
StepMetrics = dict[str, float]
"""The metrics of one step, by name: a line of a metrics file, or the lines of several roles joined."""
_SUCCESS = re.compile(r".* SUCCESS (?:Step \d+ \|.*|(.*))")
"""Matches two lines of roles: a step line, which is replaced by the dialect's own, and a sample line, whose text is group 1."""
_STEP_METRICS = {"reward": "reward/mean", "entropy": "entropy/mean", "importance_ratio": "importance_ratio/mean"}
_TRANSFORMERS_METRICS = {"loss": "loss/mean", "learning_rate": "optim/lr", "grad_norm": "optim/grad_norm"}
"""The metrics of the dialect's step line, and of the dictionary that `transformers` prints, by their names there."""


@dataclass(slots=True, kw_only=True)
class VfConsole:
    """Makes the console lines of one run. A line of the launcher without another form in the dialect stays as it is."""

    layout: RunLayout
    model: str
    env: str
    max_steps: int
    line_interval: int = 1
    """Steps between two step lines."""
    since: float = 0.0
    """Unix time of the start. Steps that were finished before it belong to an earlier start."""
    _last_step: int = 0

    def translate(self, line: str) -> Iterator[str]:
        """Yield the lines to print for a line of the launcher: itself, lines of the dialect, or nothing."""
        line = text_line(line)
        if " rl started inference " in line:
            port: object = "unknown"
            with suppress(OSError, tomllib.TOMLDecodeError):  # the launcher has usually written its port by now
                written = tomllib.loads((self.layout.configs / "inference.toml").read_text())
                port = (as_table(written.get("server")) or {}).get("port", port)
            yield line
            yield f"Loading model {self.model}..."
            yield f"Starting vLLM server on port {port}..."
            yield "Waiting for vLLM server to be ready..."
        elif " rl inference ready " in line:
            yield "vLLM server is ready"
            yield f"Loading environment {self.env}..."
        elif (found := _SUCCESS.match(line)) is None:
            yield line
        elif found[1]:
            yield found[1]

    def step_lines(self) -> Iterator[str]:
        """Yield the lines of the steps that trainer and orchestrator have finished since the last call."""
        metrics = read_steps(self.layout)
        for step in sorted(step for step in metrics if step > self._last_step and metrics[step]["time"] >= self.since):
            self._last_step = step
            if step % self.line_interval == 0 or step == self.max_steps:
                yield str(_as_transformers(metrics[step]))
                parts = ", ".join(
                    f"{label}={metrics[step][name]:.4g}" for label, name in _STEP_METRICS.items() if name in metrics[step]
                )
                yield f"Step {step}/{self.max_steps}: {parts}"


class VfCheckpoints:
    """The `checkpoint-N/` directories of a run: the published weights of step N, and trainer_state.json."""

    def __init__(self, layout: RunLayout, *, interval: int | None, max_steps: int, replaces_run: bool = False) -> None:
        """Remember the run that is in the directory now, before the new run starts.

        Args:
            layout: the run's output directory.
            interval: steps between checkpoints; None for a checkpoint of the last step alone.
            max_steps: the last step of the run.
            replaces_run: True removes the checkpoints of the earlier run as soon as the new run has taken over the directory.
        """
        self._layout = layout
        self._interval = interval
        self._max_steps = max_steps
        self._replaces_run = replaces_run
        self._earlier_run = read_run(layout)
        self._has_begun = False

    def write_due(self) -> list[Path]:
        """Write the checkpoints whose policy is published and whose step has metrics; return their directories."""
        if not self._has_begun:
            if read_run(self._layout) in (None, self._earlier_run):
                return []  # the new run has not started: if it is refused, nothing may change
            self._has_begun = True
            for path in self._layout.root.glob("checkpoint-*") if self._replaces_run else ():
                remove_directory(path, marker=STATE)
        steps = (step for step in list_steps(self._layout.weights, marker=STABLE) if step)
        wanted = (
            step for step in steps if step == self._max_steps or (self._interval is not None and step % self._interval == 0)
        )
        due = [step for step in wanted if not self._is_written(step)]
        metrics = read_steps(self._layout) if due else {}
        return [self._write(step, metrics) for step in due if step in metrics]

    def _is_written(self, step: int) -> bool:
        """Return whether the checkpoint holds the current policy of its step. A restart may have published the step again."""
        state = self._layout.root / f"checkpoint-{step}" / STATE
        digest = read_manifest(self._layout.weights_step(step)).digest
        return state.exists() and json.loads(state.read_text()).get("policy_digest") == digest

    def _write(self, step: int, metrics: dict[int, StepMetrics]) -> Path:
        """Write a checkpoint under a temporary name and rename it. `metrics` are those of all steps."""
        final = self._layout.root / f"checkpoint-{step}"
        staging = final.with_name(f".{final.name}.tmp")
        remove_directory(staging)
        staging.mkdir()
        for path in sorted(self._layout.weights_step(step).iterdir()):
            if not any(map(path.match, NOT_OF_POLICY)):
                try:
                    os.link(path, staging / path.name)  # a published file is never written to
                except OSError:  # the file system has no hard links
                    shutil.copy2(path, staging / path.name)
        write_json_atomically(staging / STATE, self._state(step, metrics))
        sync_tree(staging)
        remove_directory(final, marker=STATE)
        staging.rename(final)
        return final

    def _state(self, step: int, metrics: dict[int, StepMetrics]) -> dict[str, object]:
        """Return the checkpoint's state in the form of `transformers.TrainerState`."""
        history = [
            {
                **_as_transformers(metrics[number]),
                **{label: metrics[number][name] for label, name in _STEP_METRICS.items() if name in metrics[number]},
                "step": number,
            }
            for number in sorted(metrics)
            if number <= step
        ]
        return {
            "global_step": step,
            "max_steps": self._max_steps,
            "epoch": metrics[step].get("progress/epoch", 0.0),
            "logging_steps": 1,
            "save_steps": self._interval or self._max_steps,
            "num_input_tokens_seen": int(metrics[step].get("progress/total_tokens", 0)),
            "log_history": history,
            "policy_digest": read_manifest(self._layout.weights_step(step)).digest,
            "is_world_process_zero": True,
            "is_local_process_zero": True,
        }


def read_steps(layout: RunLayout) -> dict[int, StepMetrics]:
    """Return the metrics of each step that trainer and orchestrator have finished. Of a repeated step the last line counts.

    Damaged lines are skipped: `trivet check` reports them.
    """
    files = (layout.metrics / "trainer.jsonl", layout.metrics / "orchestrator.jsonl")
    trainer, orchestrator = (
        {line["step"]: line for line in read_metrics(file).rows if isinstance(line.get("time"), (int, float))} for file in files
    )
    return {step: orchestrator[step] | trainer[step] for step in trainer if step in orchestrator}


def _as_transformers(metrics: StepMetrics) -> dict[str, float]:
    """Return a step's metrics under the names that `transformers` logs: `loss`, `learning_rate`, `grad_norm`, `epoch`."""
    named = {label: float(f"{metrics[name]:.4g}") for label, name in _TRANSFORMERS_METRICS.items() if name in metrics}
    return named | ({"epoch": round(metrics["progress/epoch"], 4)} if "progress/epoch" in metrics else {})
