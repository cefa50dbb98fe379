"""Writes and reads the files of one evaluation: evals/step_N/<env>/{task.json, results.jsonl, summary.json}.

Results are appended as examples finish, so an interrupted evaluation continues where it stopped. summary.json is written last:
its presence means that the evaluation is complete.
"""

from collections.abc import Collection, Sequence
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

TASK_FILE, _SUMMARY = "task.json", "summary.json"


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One environment under one policy. Results of one task are never mixed with those of another."""

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
    data_digest: str = ""
    """Digest of the examples; empty in records of earlier versions, which are not compared by it."""

    def __post_init__(self) -> None:
        """Hide secrets in the arguments, those of records that earlier versions wrote too."""
        msgspec.structs.force_setattr(self, "env_args", mask_table(self.env_args))


class ResultRecord(msgspec.Struct, kw_only=True):
    """One rollout: a line of results.jsonl."""

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
    """The results of one task while it runs."""

    def __init__(self, directory: Path, task: TaskRecord, *, does_continue: bool) -> None:
        """Open the results in `directory`.

        Args:
            does_continue: keep the examples that an earlier run of the same task finished; otherwise start with none.

        Raises:
            ConfigError: the results to continue are of another task.
        """
        self._directory = directory
        self._path = directory / RESULTS_FILE
        self.finished: dict[int, list[ResultRecord]] = {}
        """The rollouts of each finished example, by its id."""
        directory.mkdir(parents=True, exist_ok=True)
        if does_continue and (directory / TASK_FILE).exists():
            _require_same(directory / TASK_FILE, task)
            drop_torn_line(self._path)
            self.finished = _read_finished(self._path, rollouts_per_example=task.rollouts_per_example)
        else:
            for name in (_SUMMARY, RESULTS_FILE):
                (directory / name).unlink(missing_ok=True)
            write_json_atomically(directory / TASK_FILE, task)
        self._file = self._path.open("ab", buffering=0)

    @property
    def is_complete(self) -> bool:
        """A summary has been written."""
        return (self._directory / _SUMMARY).exists()

    def add(self, example_id: int, rollouts: Sequence[Rollout]) -> None:
        """Append the rollouts of a finished example to the file."""
        records = [_record(example_id, rollout) for rollout in rollouts]
        self._file.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        self.finished[example_id] = records

    def finish(self, summary: Summary) -> None:
        """Sort the results by example and write the summary, which completes the evaluation."""
        self._file.close()
        lines = [msgspec.json.encode(record) + b"\n" for _, records in sorted(self.finished.items()) for record in records]
        write_atomically(self._path, b"".join(lines))
        write_json_atomically(self._directory / _SUMMARY, summary)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()


def holds_task(directory: Path, task: TaskRecord) -> bool:
    """Return whether the results in `directory` are of this very task and can be continued."""
    try:
        _require_same(directory / TASK_FILE, task)
    except (ConfigError, FileNotFoundError):
        return False
    return True


def require_continuable(directory: Path, task: TaskRecord, *, unknown: Collection[str] = ()) -> bool:
    """Return whether `directory` has results that `task` can continue. Changes nothing.

    Args:
        unknown: fields of `task` that are not known yet, and not compared.

    Raises:
        ConfigError: the results are of another task.
    """
    if (directory / TASK_FILE).exists():
        _require_same(directory / TASK_FILE, task, unknown=unknown)
        return True
    if (directory / RESULTS_FILE).exists():
        raise ConfigError(f"{directory / RESULTS_FILE} was not written by `uv run eval`: there is no {TASK_FILE} next to it")
    return False


def read_summary(directory: Path) -> Summary | None:
    """Return the summary of a complete evaluation; None when there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return msgspec.json.decode((directory / _SUMMARY).read_bytes(), type=Summary)
    except FileNotFoundError:
        return None
    except DECODE_ERRORS as exc:
        raise ConfigError(f"{directory / _SUMMARY} cannot be read: {exc}; move the directory away to evaluate anew") from exc


def _require_same(path: Path, task: TaskRecord, *, unknown: Collection[str] = ()) -> None:
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=TaskRecord)
    except DECODE_ERRORS as exc:
        raise ConfigError(f"{path} cannot be read: {exc}; move the directory away to evaluate anew") from exc
    for name in (name for name in task.__struct_fields__ if name not in unknown):
        before, now = getattr(earlier, name), getattr(task, name)
        if before != now and not (name == "data_digest" and not (before and now)):
            raise ConfigError(
                f"{path.parent} holds results of another evaluation: {name} was {_short(before)} and is {_short(now)} now; "
                "set it back to continue them, or choose another output_dir"
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:120]}…"


def _read_finished(path: Path, *, rollouts_per_example: int) -> dict[int, list[ResultRecord]]:
    by_example: dict[int, list[ResultRecord]] = {}
    if path.exists():
        decoder = msgspec.json.Decoder(ResultRecord)
        for record in map(decoder.decode, path.read_bytes().splitlines()):
            by_example.setdefault(record.example_id, []).append(record)
    return {example_id: records for example_id, records in by_example.items() if len(records) == rollouts_per_example}


def _record(example_id: int, rollout: Rollout) -> ResultRecord:
    return ResultRecord(
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
