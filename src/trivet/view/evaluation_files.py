"""Finds the evaluations in a directory and reads their rollouts, for `trivet evals`.

A file of results may hold 100,000 rollouts: their heads are kept in memory, and a conversation is decoded when it is shown.
Nothing is written, and links to other directories are not followed.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from trivet.algorithms.difficulty import has_passed
from trivet.algorithms.rounding import are_equal
from trivet.errors import ConfigError
from trivet.evaluation.results import read_summary
from trivet.evaluation.scores import Summary
from trivet.step_directories import parse_step
from trivet.storage.durable import DECODE_ERRORS, open_regular
from trivet.view.rollouts import RolloutRow

_RESULTS, _VF_METADATA = "results.jsonl", "metadata.json"
_MAX_DEPTH = 8
"""Directories below the one that is searched: `evals/step_N/val/owner/name` has five. The limit bounds a search of `/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEvaluation:
    """One evaluation of one policy on one environment."""

    name: str
    """The environment, `val/` before it for a validation."""
    policy: str
    """`base`, `step 20`, or the model's name in results of `vf-eval`."""
    directory: Path
    summary: Summary | None
    """The scores; None while it is being evaluated."""
    fault: str = ""
    """The reason why its summary cannot be read."""

    @property
    def results(self) -> Path:
        """The file of its rollouts."""
        return self.directory / _RESULTS


class RolloutHead(msgspec.Struct, kw_only=True):
    """The fields of a rollout by which it is ordered and chosen, and the place of its line in the file."""

    example_id: int = 0
    reward: float = 0.0
    is_truncated: bool = False
    attempt: int = 0
    """Number of rollouts of the same example before it."""
    offset: int = 0
    """Bytes before the line."""
    num_bytes: int = 0
    """Length of the line."""

    @property
    def has_passed(self) -> bool:
        """Its reward is that of a success."""
        return has_passed(self.reward)


class _VfMetadata(msgspec.Struct, kw_only=True):
    """The fields of `metadata.json` that `vf-eval` writes and that are shown here."""

    env_id: str
    model: str
    avg_reward: float
    num_examples: int
    rollouts_per_example: int


RolloutPair = tuple[RolloutHead, ...]
"""One rollout, or one of each of two evaluations for the same example."""


def find_evaluations(directory: Path) -> list[FoundEvaluation]:
    """Return the evaluations in `directory`, by step and then by name.

    Args:
        directory: a run's output_dir, the output_dir of `eval`, or any directory in or above `evals/`.

    Raises:
        ConfigError: it holds none.
    """
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is no directory; give a run's output_dir or the directory of an evaluation")
    root = directory / "evals" if (directory / "evals").is_dir() else directory
    found: list[tuple[int, FoundEvaluation]] = []
    for folder, names, files in os.walk(root):
        if len(Path(folder).relative_to(root).parts) >= _MAX_DEPTH:
            names.clear()
        if _RESULTS in files:
            found.append(_read_evaluation(Path(folder)))
    if not found:
        raise ConfigError(
            f"{str(directory)!r} holds no evaluation: there is no {_RESULTS} in it; "
            "`uv run eval` writes one, and so does a run with [orchestrator.eval]"
        )
    return [evaluation for _, evaluation in sorted(found, key=lambda pair: (pair[0], pair[1].name, pair[1].policy))]


class EvaluationRollouts:
    """The rollouts of one evaluation. Keeps the file open, so that a later change of it does not matter."""

    def __init__(self, path: Path) -> None:
        """Read the heads of all rollouts.

        Raises:
            ConfigError: the file cannot be read.
        """
        self.heads: list[RolloutHead] = []
        self.num_damaged = 0
        """Lines that are no rollout."""
        try:
            self._file = open_regular(path)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
        decoder, num_seen, offset = msgspec.json.Decoder(RolloutHead), defaultdict[int, int](int), 0
        for line in self._file:
            try:
                head = decoder.decode(line)
            except DECODE_ERRORS:
                self.num_damaged += line.endswith(b"\n")  # a last line without a line break is still being written
            else:
                head.offset, head.num_bytes, head.attempt = offset, len(line), num_seen[head.example_id]
                num_seen[head.example_id] += 1
                self.heads.append(head)
            offset += len(line)

    def row(self, head: RolloutHead) -> RolloutRow | None:
        """Return a rollout with its conversation; None when its line has another form, or the file was closed.

        May be called on any thread.
        """
        try:
            return msgspec.json.decode(os.pread(self._file.fileno(), head.num_bytes, head.offset), type=RolloutRow)
        except (OSError, ValueError, *DECODE_ERRORS):
            return None

    def contains(self, head: RolloutHead, text: str) -> bool:
        """Return whether a message or a tool call contains `text`; case does not count."""
        row = self.row(head)
        messages = (*row.prompt, *row.completion) if row is not None else ()
        texts = (f"{message.get('content')}\n{message.get('tool_calls') or ''}" for message in messages)
        return any(text.casefold() in candidate.casefold() for candidate in texts)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()


def pair_rollouts(evaluations: Sequence[EvaluationRollouts]) -> list[RolloutPair]:
    """Return the rollouts of one evaluation, or those of two that are of the same example and attempt, in the first's order."""
    first, *others = evaluations
    by_key = [{(head.example_id, head.attempt): head for head in other.heads} for other in others]
    pairs = [(head, *(heads.get((head.example_id, head.attempt)) for heads in by_key)) for head in first.heads]
    return [tuple(head for head in pair if head is not None) for pair in pairs if None not in pair]


def _gain(pair: RolloutPair) -> float:
    """Return what the second's reward is above the first's; exactly 0 where they differ by rounding alone."""
    rewards = np.array([pair[0].reward, pair[-1].reward])
    return 0.0 if are_equal(rewards) else float(rewards[1] - rewards[0])


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
"""Orders of pairs, by the second's reward minus the first's."""
FILTERS: dict[str, Callable[[RolloutPair], bool]] = {
    "all": lambda pair: True,
    "passed": lambda pair: pair[0].has_passed,
    "not passed": lambda pair: not pair[0].has_passed,
    "truncated": lambda pair: pair[0].is_truncated,
}
PAIR_FILTERS: dict[str, Callable[[RolloutPair], bool]] = {
    "all": lambda pair: True,
    "different reward": lambda pair: _gain(pair) != 0,
    "second better": lambda pair: _gain(pair) > 0,
    "second worse": lambda pair: _gain(pair) < 0,
}


def _read_evaluation(directory: Path) -> tuple[int, FoundEvaluation]:
    """Return an evaluation after the step of its policy, by which the list is ordered."""
    summary, fault, policy = None, "", ""
    try:
        summary = read_summary(directory)
    except ConfigError as exc:
        fault = str(exc)
    parts = directory.resolve().parts
    place = next((place for place in range(len(parts) - 1, 0, -1) if parse_step(parts[place - 1]) is not None), None)
    step = parse_step(parts[place - 1]) if place is not None else None
    name = "/".join(parts[place:]) if place is not None else ""
    if summary is not None:
        step, name = summary.step, name or summary.env
    elif metadata := _read_vf_metadata(directory):
        policy, name = metadata.model, metadata.env_id
        summary = _summary_of(metadata)
    if not policy and step is not None:
        policy = f"step {step}" if step else "base"
    found = FoundEvaluation(
        name=name or directory.resolve().name, policy=policy, directory=directory, summary=summary, fault=fault
    )
    return step or 0, found


def _read_vf_metadata(directory: Path) -> _VfMetadata | None:
    try:
        return msgspec.json.decode((directory / _VF_METADATA).read_bytes(), type=_VfMetadata)
    except (OSError, *DECODE_ERRORS):
        return None


def _summary_of(metadata: _VfMetadata) -> Summary:
    return Summary(
        env=metadata.env_id,
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
