"""Reads the evaluations of a run: the scores of each policy on each environment, and where their rollouts lie."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from trivet.config.layout import RunLayout
from trivet.evaluation.scores import Summary
from trivet.step_directories import list_steps
from trivet.storage.durable import DECODE_ERRORS
from trivet.view.files import FileStamp, NotServed, read_inside, stamp_of

_SUMMARY, _RESULTS = "summary.json", "results.jsonl"
_MAX_DEPTH = 4
"""Directories below step_N: `val/`, and an id of a hub has one slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation of one policy."""

    step: int
    name: str
    """The environment, `val/` before it for a validation."""
    summary: Summary | None
    """The scores; None while it is being evaluated."""
    fault: str = ""
    """The reason why its summary cannot be read."""


class RunEvals:
    """Reads each summary once, until its file changes."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._read: dict[Path, tuple[FileStamp | None, Summary | None, str]] = {}

    def results(self) -> list[EvalResult]:
        """Return the evaluations by step, then by name."""
        found: list[EvalResult] = []
        for step, directory in self._steps():
            for results in _results_files(directory):
                stamp, summary, fault = self._summary(results.parent / _SUMMARY)
                if stamp is not None or results.stat().st_size:
                    name = results.parent.relative_to(directory).as_posix()
                    found.append(EvalResult(step=step, name=name, summary=summary, fault=fault))
        return found

    def results_file(self, step: int, name: str) -> Path:
        """Return the file of one evaluation's rollouts.

        Raises:
            NotServed: there is no such evaluation.
        """
        for found_step, directory in self._steps():
            for results in _results_files(directory) if found_step == step else ():
                if results.parent.relative_to(directory).as_posix() == name:
                    return results
        raise NotServed(f"the run has no evaluation {name!r} of step {step}")

    def stamp(self) -> list[FileStamp | None]:
        """Changes when an evaluation is added, goes on or ends."""
        files = [results for _, directory in self._steps() for results in _results_files(directory)]
        return [stamp_of(self._layout.evals), *map(stamp_of, files), *(stamp_of(path.parent / _SUMMARY) for path in files)]

    def _steps(self) -> list[tuple[int, Path]]:
        return list(list_steps(self._layout.evals).items())

    def _summary(self, path: Path) -> tuple[FileStamp | None, Summary | None, str]:
        stamp = stamp_of(path)
        known = self._read.get(path)
        if known is not None and known[0] == stamp:
            return known
        summary, fault = None, ""
        if stamp is not None:
            try:
                summary = msgspec.json.decode(read_inside(self._layout.root, path), type=Summary)
            except (NotServed, *DECODE_ERRORS) as exc:
                fault = f"{_SUMMARY} cannot be read: {exc}"
        self._read[path] = (stamp, summary, fault)
        return self._read[path]


def _results_files(directory: Path, *, depth: int = 1) -> list[Path]:
    found = [directory / _RESULTS] if (directory / _RESULTS).is_file() else []
    if depth <= _MAX_DEPTH:
        folders = sorted(path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
        found += [file for folder in folders for file in _results_files(folder, depth=depth + 1)]
    return found
