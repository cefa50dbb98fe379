"""`checkpoint-N/` as verifiers' trainer leaves it, beside our own tree: the published weights of step N and trainer_state.json.

Called by `launcher.vf_rl` while the run goes on. What resumes a run is our own checkpoint of the same step.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trivet.config.layout import MANIFEST, STABLE, RunLayout
from trivet.durable import remove_directory, sync_tree, write_json_atomically
from trivet.launcher.run_directory import read_run
from trivet.launcher.vf_console import MetricsLine, dictionary_of, read_steps
from trivet.step_directories import list_steps
from trivet.weights.manifest import read_manifest

STATE = "trainer_state.json"
_OWN = {MANIFEST, STABLE}


class VfCheckpoints:
    """
    >>> checkpoints = VfCheckpoints(layout, every=50, max_steps=100)
    >>> checkpoints.write_due()
    [PosixPath('outputs/reverse-text/checkpoint-50')]
    """

    def __init__(self, layout: RunLayout, *, every: int | None, max_steps: int, replaces_run: bool = False) -> None:
        """
        Made before the run is started: what lies in the directory until then is another start's.

        Args:
            every: steps between them; None: the last step's alone.
            replaces_run: remove the checkpoints of the run before, once this one has taken the directory.
        """
        self._layout = layout
        self._every = every
        self._max_steps = max_steps
        self._replaces_run = replaces_run
        self._before = read_run(layout)
        self._has_begun = False

    def write_due(self) -> list[Path]:
        """Write those whose policy is published and whose step's metrics are there; returns their directories."""
        if not self._begin():
            return []
        due = [step for step in self._published() if not self._is_written(step)]
        if not due:
            return []
        rows = read_steps(self._layout)
        return [self._write(step, rows) for step in due if step in rows]

    def _begin(self) -> bool:
        """Whether the run has taken the directory: one that was refused leaves everything as it was."""
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
        """With this policy: one that was taken back by a restart is replaced."""
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
                _share(path, staging / path.name)
        write_json_atomically(staging / STATE, self._state(step, rows))
        sync_tree(staging)
        remove_directory(final, marker=STATE)
        staging.rename(final)
        return final

    def _state(self, step: int, rows: dict[int, MetricsLine]) -> dict[str, object]:
        """In the form of `transformers.TrainerState`."""
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


def _share(source: Path, target: Path) -> None:
    """The same bytes without a second copy where the file system can: a published file is never written to."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
