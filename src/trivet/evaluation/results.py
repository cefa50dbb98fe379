"""Writes and reads the files of one evaluation: evals/step_N/<env>/{task.json, results.jsonl, summary.json}.

Results are appended as examples finish, so an interrupted evaluation continues where it stopped. summary.json is written last:
its presence means that the evaluation is complete.
"""

import logging
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from trivet.config.layout import RESULTS_FILE
from trivet.config.masking import mask_table
from trivet.errors import ConfigError
from trivet.evaluation.scores import Summary
from trivet.storage.durable import DECODE_ERRORS, write_atomically, write_json_atomically
from trivet.telemetry.events import drop_torn_line
from trivet.wire.groups import SamplingArguments, Split
from trivet.wire.rollouts import Rollout

logger = logging.getLogger(__name__)

TASK_FILE, SUMMARY_FILE = "task.json", "summary.json"


class EarlierResults(StrEnum):
    """How an evaluation treats earlier results in its directory."""

    REPLACE = "replace"
    CONTINUE = "continue"
    """Continue results of the same task, replace results of another task."""
    REQUIRE_SAME = "require_same"
    """Continue results of the same task, raise an error for results of another task."""


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The task of an evaluation: one environment on one policy, as in task.json. Results of two tasks are never mixed."""

    env: str
    env_id: str
    env_args: dict[str, Any]
    split: Split
    step: int
    digest: str
    """The digest of the policy's weights."""
    first_example: int
    num_examples: int
    rollouts_per_example: int
    sampling: SamplingArguments
    data_digest: str
    """Digest of the examples."""

    def __post_init__(self) -> None:
        """Hide secrets in the arguments."""
        msgspec.structs.force_setattr(self, "env_args", mask_table(self.env_args))


class ResultRecord(msgspec.Struct, kw_only=True):
    """One rollout of an evaluation: a line of results.jsonl."""

    example_id: int
    index: int
    reward: float
    scores: dict[str, float]
    num_turns: int
    is_truncated: bool
    completion_tokens: int
    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]


class ResultsFile:
    """The results.jsonl of one task while it is evaluated."""

    def __init__(self, directory: Path, task: TaskRecord, earlier: EarlierResults) -> None:
        """Open the results in `directory`, and read earlier results of `task` unless `earlier` replaces them.

        Raises:
            ConfigError: `earlier` is REQUIRE_SAME, and the results are of another task.
        """
        self._directory = directory
        self._path = directory / RESULTS_FILE
        self.finished: dict[int, list[ResultRecord]] = {}
        """The rollouts of each finished example, by its id."""
        difference = explain_difference(directory, task)
        if difference and earlier is EarlierResults.REQUIRE_SAME:
            raise ConfigError(difference)
        directory.mkdir(parents=True, exist_ok=True)
        if difference == "" and earlier is not EarlierResults.REPLACE:
            drop_torn_line(self._path)
            by_example: dict[int, list[ResultRecord]] = {}
            for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
                record = msgspec.json.decode(line, type=ResultRecord)
                by_example.setdefault(record.example_id, []).append(record)
            self.finished = {
                example_id: records for example_id, records in by_example.items() if len(records) == task.rollouts_per_example
            }
        else:
            if difference:
                logger.warning("results of another evaluation in %s are replaced", directory)
            for name in (SUMMARY_FILE, RESULTS_FILE):
                (directory / name).unlink(missing_ok=True)
            write_json_atomically(directory / TASK_FILE, task)
        self._file = self._path.open("ab", buffering=0)

    def add(self, example_id: int, rollouts: Sequence[Rollout]) -> None:
        """Append the rollouts of a finished example to the file."""
        records = [
            ResultRecord(
                example_id=example_id,
                index=rollout.index,
                reward=rollout.reward,
                scores=rollout.scores,
                num_turns=rollout.num_turns,
                is_truncated=rollout.is_truncated,
                completion_tokens=rollout.num_completion_tokens,
                prompt=rollout.prompt,
                completion=rollout.completion,
            )
            for rollout in rollouts
        ]
        self._file.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        self.finished[example_id] = records

    def finish(self, summary: Summary) -> None:
        """Sort the results by example and write the summary, which completes the evaluation."""
        self._file.close()
        lines = [msgspec.json.encode(record) + b"\n" for _, records in sorted(self.finished.items()) for record in records]
        write_atomically(self._path, b"".join(lines))
        write_json_atomically(self._directory / SUMMARY_FILE, summary)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()


def explain_difference(directory: Path, task: TaskRecord) -> str | None:
    """Return why the results in `directory` are not of `task`; "" when they are, None when there are no results."""
    path = directory / TASK_FILE
    if not path.exists():
        results = directory / RESULTS_FILE
        is_foreign = results.exists()
        return f"{results} was not written by `uv run eval`: there is no {TASK_FILE} next to it" if is_foreign else None
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=TaskRecord)
    except DECODE_ERRORS as exc:
        return f"{path} cannot be read: {exc}; move the directory away to evaluate anew"
    for name in task.__struct_fields__:
        before, now = getattr(earlier, name), getattr(task, name)
        if before != now:
            return (
                f"{directory} holds results of another evaluation: {name} was {_shorten(before)} and is {_shorten(now)} now; "
                "set it back to continue them, or choose another output_dir"
            )
    return ""


def read_summary(directory: Path) -> Summary | None:
    """Return the summary of a complete evaluation; None when there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = directory / SUMMARY_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError:
        return None
    except DECODE_ERRORS as exc:
        raise ConfigError(f"{path} cannot be read: {exc}; move the directory away to evaluate anew") from exc


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
