"""Finds the evaluations in a directory, and pairs the rollouts of two of them, for the page and the command `trivet evals`.

Nothing is written, and links to other directories are not followed.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from trivet.algorithms.arithmetic import are_equal
from trivet.algorithms.difficulty import has_passed
from trivet.config.layout import RESULTS_FILE
from trivet.errors import ConfigError
from trivet.evaluation.results import SUMMARY_FILE
from trivet.evaluation.scores import Summary
from trivet.step_directories import parse_step
from trivet.storage.durable import DECODE_ERRORS
from trivet.view.files import FileStamp, NotServed, read_inside, stamp_of
from trivet.view.rollouts import RolloutFile, RolloutHead

_VF_METADATA = "metadata.json"
"""Name of the file that `vf-eval` writes next to its results."""
_MAX_DEPTH = 8
"""Limit of the directory levels that are searched, which bounds a search of `/`. `evals/step_N/val/owner/name` has five."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEvaluation:
    """One evaluation of one policy on one environment."""

    step: int
    """The policy's version; 0 where it is unknown."""
    name: str
    """The name of the environment, after `val/` for a validation."""
    policy: str
    """`base`, `step 20`, or the model's name in results of `vf-eval`."""
    directory: Path
    summary: Summary | None
    """The scores; None while the evaluation runs."""
    fault: str = ""
    """The reason why the summary cannot be read; empty when it can."""

    @property
    def results(self) -> Path:
        """The file of its rollouts."""
        return self.directory / RESULTS_FILE


class _VfMetadata(msgspec.Struct, kw_only=True):
    """The fields of the `metadata.json` of `vf-eval` that are shown."""

    env_id: str
    model: str
    avg_reward: float
    num_examples: int
    rollouts_per_example: int


class Evaluations:
    """Finds the evaluations in a directory. Each is read again when its summary changes. Use it from one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Read nothing yet.

        Args:
            directory: a run's output_dir, the output_dir of `eval`, or any directory in or above `evals/`.
        """
        self._root = directory / "evals" if (directory / "evals").is_dir() else directory
        self._read: dict[Path, tuple[FileStamp | None, FoundEvaluation]] = {}

    def find(self) -> list[FoundEvaluation]:
        """Return the evaluations, ordered by step and then by name."""
        found: list[FoundEvaluation] = []
        for directory in self._directories():
            stamp = stamp_of(directory / SUMMARY_FILE)
            if directory not in self._read or self._read[directory][0] != stamp:
                self._read[directory] = (stamp, self._read_evaluation(directory))
            found.append(self._read[directory][1])
        return sorted(found, key=lambda evaluation: (evaluation.step, evaluation.name, evaluation.policy))

    def stamp(self) -> list[FileStamp | None]:
        """Return a value that changes when an evaluation is added, continues or ends."""
        return [stamp_of(path / name) for path in self._directories() for name in (RESULTS_FILE, SUMMARY_FILE)]

    def _directories(self) -> list[Path]:
        found: list[Path] = []
        for folder, names, files in os.walk(self._root):
            if len(Path(folder).relative_to(self._root).parts) >= _MAX_DEPTH:
                names.clear()
            if RESULTS_FILE in files:
                found.append(Path(folder))
        return found

    def _read_evaluation(self, directory: Path) -> FoundEvaluation:
        summary, fault, policy = None, "", ""
        try:
            if (directory / SUMMARY_FILE).exists():
                summary = msgspec.json.decode(read_inside(self._root, directory / SUMMARY_FILE), type=Summary)
        except (NotServed, *DECODE_ERRORS) as exc:
            fault = f"{SUMMARY_FILE} cannot be read: {exc}"
        parts = directory.resolve().parts
        # The path is `…/step_N/<name>`, and the name may have several parts.
        name_at = next((index for index in range(len(parts) - 1, 0, -1) if parse_step(parts[index - 1]) is not None), None)
        step = parse_step(parts[name_at - 1]) if name_at is not None else None
        name = "/".join(parts[name_at:]) if name_at is not None else ""
        if summary is not None:
            step, name = summary.step, name or summary.env
        else:
            with suppress(NotServed, *DECODE_ERRORS):
                metadata = msgspec.json.decode(read_inside(self._root, directory / _VF_METADATA), type=_VfMetadata)
                policy, name = metadata.model, metadata.env_id
                summary = Summary(
                    env=name,
                    step=0,
                    digest="",
                    num_examples=metadata.num_examples,
                    rollouts_per_example=metadata.rollouts_per_example,
                    num_failed=0,
                    avg=metadata.avg_reward,
                    ci95=None,
                    pass_at_k=None,
                    truncated=None,
                    completion_tokens=0,
                    seconds=0.0,
                )
        if not policy and step is not None:
            policy = f"step {step}" if step else "base"
        return FoundEvaluation(
            step=step or 0,
            name=name or directory.resolve().name,
            policy=policy,
            directory=directory,
            summary=summary,
            fault=fault,
        )


def find_evaluations(directory: Path) -> list[FoundEvaluation]:
    """Return the evaluations in `directory`, as `Evaluations.find`.

    Raises:
        ConfigError: there is no such directory, or no evaluation in it.
    """
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is no directory; give a run's output_dir or the directory of an evaluation")
    if not (found := Evaluations(directory).find()):
        raise ConfigError(
            f"{str(directory)!r} holds no evaluation: there is no {RESULTS_FILE} in it; "
            "`uv run eval` writes one, and so does a run with [orchestrator.eval]"
        )
    return found


RolloutPair = tuple[RolloutHead, ...]
"""One rollout; or two rollouts of the same example and attempt, one from each of two evaluations."""


def pair_rollouts(evaluations: Sequence[RolloutFile]) -> list[RolloutPair]:
    """Return the rollouts of one evaluation, or the pairs of two, in the order of the first. Rollouts without a pair are
    left out.
    """
    first, *others = evaluations
    by_key = [{(head.example_id, head.attempt): head for head in other.heads} for other in others]
    pairs = [(head, *(heads.get((head.example_id, head.attempt)) for heads in by_key)) for head in first.heads]
    return [tuple(head for head in pair if head is not None) for pair in pairs if None not in pair]


def _gain(pair: RolloutPair) -> float:
    """Return the second reward minus the first; exactly 0 where they differ only by rounding."""
    rewards = np.array([pair[0].reward, pair[-1].reward])
    return 0.0 if are_equal(rewards) else float(rewards[1] - rewards[0])


# The names below are the choices that the page and `trivet evals` show. Those with PAIR_ are for two evaluations.
SORTS: dict[str, Callable[[RolloutPair], float]] = {
    "in file order": lambda pair: pair[0].offset,
    "lowest reward first": lambda pair: pair[0].reward,
    "highest reward first": lambda pair: -pair[0].reward,
}
PAIR_SORTS = {
    "in file order": SORTS["in file order"],
    "greatest loss first": _gain,
    "greatest gain first": lambda pair: -_gain(pair),
}
"""Orders of pairs, by the second reward minus the first."""
FILTERS: dict[str, Callable[[RolloutPair], bool]] = {
    "all": lambda pair: True,
    "passed": lambda pair: has_passed(pair[0].reward),
    "not passed": lambda pair: not has_passed(pair[0].reward),
    "truncated": lambda pair: pair[0].is_truncated,
}
PAIR_FILTERS: dict[str, Callable[[RolloutPair], bool]] = {
    "all": lambda pair: True,
    "different reward": lambda pair: _gain(pair) != 0,
    "second better": lambda pair: _gain(pair) > 0,
    "second worse": lambda pair: _gain(pair) < 0,
}
