"""Compares rollouts/step_N/ with what the history says of batch N: its groups, their examples, rewards and policies."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from trivet.config.layout import ROLLOUTS_FILE, RunLayout
from trivet.history.breaches import Invariant, Ledger
from trivet.history.groups import LiveGroup
from trivet.storage.durable import DECODE_ERRORS, digest_of, hash_files, list_files
from trivet.wire.events import RolloutsWritten
from trivet.wire.versions import VersionRun

_ONCE, _VERSIONS, _RECORD = Invariant.EXACTLY_ONCE, Invariant.VERSIONS_TELL_THE_TRUTH, Invariant.INTACT_RECORD
_MEAN_TOLERANCE = 1e-9
"""Relative: the mean of the same rewards, added up in another order."""


class _Row(msgspec.Struct):
    """The fields of a line of rollouts.jsonl that are compared."""

    group_id: int
    env: str
    example_id: int
    index: int
    reward: float | None
    """The reward; None when it is no number."""
    versions: list[VersionRun] = []


def compare_step(
    ledger: Ledger,
    layout: RunLayout,
    step: int,
    *,
    groups: Mapping[int, LiveGroup],
    written: RolloutsWritten | None,
    group_size: int | None,
    is_replay: bool = False,
) -> None:
    """Compare the files in rollouts/step_N/ with the groups of batch N.

    Args:
        groups: of batch `step`, as they were when it was formed.
        written: the orchestrator's word about the files; None in histories of older versions.
        group_size: rollouts of each group; None if it is unknown.
        is_replay: versions are of another run's policies.

    Raises:
        FileNotFoundError: a running run removed the files meanwhile.
    """
    directory = layout.rollouts_step(step)
    if written is not None:
        _compare_bytes(ledger, directory, written)
    path = directory / ROLLOUTS_FILE
    rows = _read_rows(ledger, path)
    if rows is None:
        return
    ledger.require(set(rows) == set(groups), _ONCE, f"{path} holds {_difference(rows, groups)} than step {step} trained")
    newest = max((run.version for found in rows.values() for row in found for run in row.versions), default=0)
    ledger.require(
        newest < step or is_replay,
        _VERSIONS,
        f"{path} holds tokens of policy {newest}; step {step} trained before it existed",
    )
    for group_id in sorted(rows.keys() & groups.keys()):
        _compare_group(ledger, path, rows[group_id], groups[group_id], group_size=group_size)


def _compare_bytes(ledger: Ledger, directory: Path, written: RolloutsWritten) -> None:
    names = [name for name in list_files(directory) if not name.startswith(".")]  # else what a killed writer left
    ledger.require(
        digest_of(hash_files(directory, names)) == written.digest,
        _RECORD,
        f"the files in {directory} are not those that were written there: one was changed, added or removed",
    )


def _read_rows(ledger: Ledger, path: Path) -> dict[int, list[_Row]] | None:
    """Group the lines by group; None when a line is no rollout."""
    decoder = msgspec.json.Decoder(_Row)
    rows: dict[int, list[_Row]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = decoder.decode(line)
            except DECODE_ERRORS as exc:
                ledger.require(False, _RECORD, f"{path}:{number} is no rollout: {exc}")
                return None
            if not ledger.require(line.endswith(b"\n"), _RECORD, f"{path}:{number} is cut short"):
                return None
            rows.setdefault(row.group_id, []).append(row)
    return rows


def _compare_group(ledger: Ledger, path: Path, rows: Sequence[_Row], group: LiveGroup, *, group_size: int | None) -> None:
    name = f"group {rows[0].group_id} in {path}"
    ledger.require(
        [row.index for row in rows] == list(range(group_size or len(rows))),
        _ONCE,
        f"{name} has the rollouts {[row.index for row in rows][:8]} of {group_size or 'an unknown number'}",
    )
    if not group.env:
        return  # of another run's checkpoint: this history knows its id alone
    ledger.require(
        all((row.env, row.example_id) == (group.env, group.example_id) for row in rows),
        _ONCE,
        f"{name} is of example {(rows[0].env, rows[0].example_id)}; it was dispatched as {(group.env, group.example_id)}",
    )
    rewards = [row.reward for row in rows if row.reward is not None]
    if len(rewards) == len(rows):
        mean = math.fsum(rewards) / len(rewards)
        ledger.require(
            math.isclose(mean, group.reward_mean, rel_tol=_MEAN_TOLERANCE, abs_tol=_MEAN_TOLERANCE),
            _ONCE,
            f"{name} has the mean reward {mean:.9g}; it finished with {group.reward_mean:.9g}",
        )
    versions = [run.version for row in rows for run in row.versions]
    found = (min(versions, default=-1), max(versions, default=-1))
    ledger.require(
        found == (group.oldest, group.newest),
        _VERSIONS,
        f"{name} holds tokens of policies {found[0]} to {found[1]}; it finished with {group.oldest} to {group.newest}",
    )


def _difference(found: Mapping[int, object], expected: Mapping[int, object]) -> str:
    missing, added = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    parts = [f"not {missing[:8]}"] * bool(missing) + [f"also {added[:8]}"] * bool(added)
    return f"other groups ({' but '.join(parts)})"
