"""Compares what a run published with its history: policies in weights/, and the rollouts of each batch in rollouts/."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trivet.config.layout import MANIFEST, ROLLOUTS_FILE, STABLE, RunLayout
from trivet.errors import WeightsError
from trivet.history.breaches import Invariant, Ledger
from trivet.history.groups import LiveGroup
from trivet.history.record import Extent, read_lines
from trivet.history.replay import Replay
from trivet.storage.durable import DECODE_ERRORS, digest_of, hash_files, list_files
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import verify
from trivet.wire.events import Retire
from trivet.wire.versions import PolicyVersion, VersionRun

_ONCE, _VERSIONS, _READERS, _RECORD = (
    Invariant.EXACTLY_ONCE,
    Invariant.VERSIONS_TELL_THE_TRUTH,
    Invariant.READERS_ARE_SAFE,
    Invariant.INTACT_RECORD,
)
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


def compare_weights(replay: Replay, layout: RunLayout, versions: Sequence[PolicyVersion]) -> None:
    """Compare the policies that lay in weights/ with those that were published and removed."""
    policies, ledger = replay.policies, replay.ledger
    for version in versions:
        directory = layout.weights_step(version)
        try:
            manifest = verify(directory)
        except WeightsError as exc:
            if (directory / STABLE).exists():
                ledger.require(False, _READERS, str(exc))
            continue
        if version in policies.retired:
            ledger.require(
                not (directory / STABLE).exists(), _READERS, f"policy {version} was removed, and {directory} is there"
            )
            continue
        published = policies.published.get(version)
        if published is None and version <= replay.first_step:
            continue  # of the run that this one was forked from
        ledger.require(
            published == manifest.digest,
            _VERSIONS,
            f"{directory} has digest {manifest.digest[:12]}; published under {version} is {(published or 'nothing')[:12]}",
        )
        ledger.require(
            manifest.run_id == replay.run_id,
            _RECORD,
            f"{directory / MANIFEST} is of run {manifest.run_id!r}, the history of {replay.run_id!r}",
        )
        added = sorted(set(list_files(directory)) - {MANIFEST, STABLE, *manifest.files})
        ledger.require(not added, _READERS, f"{directory} holds {added[:3]}, which nobody published")


def require_published(replay: Replay, layout: RunLayout, extent: Extent, *, is_live: bool) -> None:
    """Require that every policy that was published and not removed is there."""
    published = replay.policies.published
    missing = [version for version in sorted(published) if version not in published_versions(layout)]
    if missing and is_live:
        later = {
            line.event.version for line in read_lines(layout.events, first=extent.num_bytes) if isinstance(line.event, Retire)
        }
        missing = [version for version in missing if version not in later]
    # A removal comes before its event: of each attempt that was cut short it may have happened to one policy older than
    # the step that the next attempt went back to, which then removed what was left of it. A publication's event comes
    # before its directory.
    cuts = sorted(replay.roles.starts_after_cut.get(replay.trainer_role, []))
    newest = max(published, default=0)
    is_cut_short = replay.roles.is_cut_short(replay.trainer_role)
    if is_cut_short:
        cuts.append(newest)
        missing = [version for version in missing if version != newest]
    for version in reversed(missing):
        directory = layout.weights_step(version)
        if cuts and version < cuts[-1] and (is_cut_short or not directory.exists()):
            cuts.pop()
            continue
        replay.ledger.require(
            False, _READERS, f"policy {version} was published and not removed; {directory} is not there, or not complete"
        )
    replay.ledger.checks += len(published)


def compare_rollouts(replay: Replay, layout: RunLayout, steps: Sequence[int], *, group_size: int | None, is_live: bool) -> None:
    """Compare the rollouts of each step with the batch that was formed for it.

    Args:
        steps: those whose files lay there before the history was read.
        group_size: rollouts of each group; None if it is unknown.
        is_live: the run goes on, and may remove files meanwhile.
    """
    ledger, groups = replay.ledger, replay.groups
    for step in steps:
        formed = groups.formed.get(step)
        if formed is None:
            # The files of steps that are taken again go away just after the start.
            is_left_over = is_live or not groups.num_since_start
            ledger.require(
                is_left_over or step <= replay.first_step,
                _ONCE,
                f"{layout.rollouts_step(step)} holds rollouts, and the history forms no batch {step}",
            )
            continue
        with suppress(*([FileNotFoundError] if is_live else [])):
            _compare_step(replay, layout, step, formed, group_size=group_size)
    for step in sorted(groups.rollouts.keys() - set(steps)):
        ledger.require(is_live, _ONCE, f"the rollouts of step {step} were written, and {layout.rollouts_step(step)} has none")
    if num_unsaid := len(set(steps) - groups.rollouts.keys()):
        ledger.not_examined.append(f"texts and scores in the rollouts of {num_unsaid:,} steps: the history has no digest")


def _compare_step(
    replay: Replay, layout: RunLayout, step: int, groups: Mapping[int, LiveGroup], *, group_size: int | None
) -> None:
    """Compare the files in rollouts/step_N/ with the groups of batch N, as they were when it was formed."""
    ledger, directory = replay.ledger, layout.rollouts_step(step)
    if (written := replay.groups.rollouts.get(step)) is not None:
        names = [name for name in list_files(directory) if not name.startswith(".")]  # else what a killed writer left
        ledger.require(
            digest_of(hash_files(directory, names)) == written.digest,
            _RECORD,
            f"the files in {directory} are not those that were written there: one was changed, added or removed",
        )
    path = directory / ROLLOUTS_FILE
    rows = _read_rows(ledger, path)
    if rows is None:
        return
    missing, added = sorted(groups.keys() - rows.keys()), sorted(rows.keys() - groups.keys())
    parts = [f"not {missing[:8]}"] * bool(missing) + [f"also {added[:8]}"] * bool(added)
    ledger.require(not parts, _ONCE, f"{path} holds other groups ({' but '.join(parts)}) than step {step} trained")
    newest = max((run.version for found in rows.values() for row in found for run in row.versions), default=0)
    ledger.require(
        newest < step or replay.groups.is_replay,
        _VERSIONS,
        f"{path} holds tokens of policy {newest}; step {step} trained before it existed",
    )
    for group_id in sorted(rows.keys() & groups.keys()):
        _compare_group(ledger, path, rows[group_id], groups[group_id], group_size=group_size)


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
