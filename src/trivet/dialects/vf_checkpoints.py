"""Writes `checkpoint-N/` as verifiers' trainer leaves it: the published weights of step N and trainer_state.json.

Called by `dialects.vf_rl` while the run goes on. A run resumes from our own checkpoint of the same step, not from these.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trivet.checkpoints.run_record import read_run
from trivet.config.layout import MANIFEST, STABLE, RunLayout
from trivet.dialects.vf_console import MetricsLine, dictionary_of, read_steps
from trivet.step_directories import list_steps
from trivet.storage.durable import remove_directory, sync_tree, write_json_atomically
from trivet.weights.manifest import read_manifest

STATE = "trainer_state.json"
_OWN = {MANIFEST, STABLE}


class VfCheckpoints:
    """The `checkpoint-N/` directories of a run."""

    def __init__(self, layout: RunLayout, *, every: int | None, max_steps: int, replaces_run: bool = False) -> None:
        """Note what lies in the directory before the run is started: it is an earlier start's.

        Args:
            every: steps between checkpoints; None: the last step's alone.
            replaces_run: remove the checkpoints of the run before, once this one has taken the directory.
        """
        self._layout = layout
        self._every = every
        self._max_steps = max_steps
        self._replaces_run = replaces_run
        self._before = read_run(layout)
        self._has_begun = False

    def write_due(self) -> list[Path]:
        """Write the checkpoints whose policy is published and whose step has metrics; return their directories."""
        if not self._has_taken_directory():
            return []
        due = [step for step in self._published() if not self._is_written(step)]
        if not due:
            return []
        rows = read_steps(self._layout)
        return [self._write(step, rows) for step in due if step in rows]

    def _has_taken_directory(self) -> bool:
        """Return whether the run has taken the directory. A run that was refused leaves everything as it was."""
        if not self._has_begun and read_run(self._layout) not in (None, self._before):
            self._has_begun = True
            for path in self._layout.root.glob("checkpoint-*") if self._replaces_run else ():
                remove_directory(path, marker=STATE)
        return self._has_begun

    def _published(self) -> Iterator[int]:
        return (step for step in list_steps(self._layout.weights, marker=STABLE) if step and self._is_due(step))

    def _is_due(self, step: int) -> bool:
        return step == self._max_steps or (self._every is not None and step % self._every == 0)

    def _is_written(self, step: int) -> bool:
        """Return whether the checkpoint holds the policy published now; a restart may have replaced that."""
        state = self._directory(step) / STATE
        return state.exists() and json.loads(state.read_text()).get("policy_digest") == self._digest(step)

    def _digest(self, step: int) -> str:
        return read_manifest(self._layout.weights_step(step)).digest

    def _directory(self, step: int) -> Path:
        return self._layout.root / f"checkpoint-{step}"

    def _write(self, step: int, rows: dict[int, MetricsLine]) -> Path:
        final = self._directory(step)
        staging = final.with_name(f".{final.name}.tmp")
        remove_directory(staging)
        staging.mkdir()
        for path in sorted(self._layout.weights_step(step).iterdir()):
            if path.name not in _OWN:
                _link_or_copy(path, staging / path.name)
        write_json_atomically(staging / STATE, self._state(step, rows))
        sync_tree(staging)
        remove_directory(final, marker=STATE)
        staging.rename(final)
        return final

    def _state(self, step: int, rows: dict[int, MetricsLine]) -> dict[str, object]:
        """Return the checkpoint's state in the form of `transformers.TrainerState`."""
        return {
            "global_step": step,
            "max_steps": self._max_steps,
            "epoch": rows[step].get("progress/epoch", 0.0),
            "logging_steps": 1,
            "save_steps": self._every or self._max_steps,
            "num_input_tokens_seen": int(rows[step].get("progress/total_tokens", 0)),
            "log_history": [{**dictionary_of(rows[n]), **_scores(rows[n]), "step": n} for n in sorted(rows) if n <= step],
            "policy_digest": self._digest(step),
            "is_world_process_zero": True,
            "is_local_process_zero": True,
        }


def _scores(row: MetricsLine) -> dict[str, float]:
    return {name: row[f"{name}/mean"] for name in ("reward", "entropy", "importance_ratio") if f"{name}/mean" in row}


def _link_or_copy(source: Path, target: Path) -> None:
    """Link the file, or copy it where the file system cannot: a published file is never written to."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
