"""Compares a run's published files with its history: policies in weights/, and the rollouts of each batch in rollouts/."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from trivet.config.layout import MANIFEST, ROLLOUTS_FILE, STABLE, RunLayout
from trivet.errors import WeightsError
from trivet.history.groups import LiveGroup
from trivet.history.ledger import Invariant, Ledger
from trivet.history.record import read_lines
from trivet.history.run_history import RunHistory
from trivet.storage.durable import DECODE_ERRORS, digest_of, explain_difference, hash_files, list_files
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import verify
from trivet.wire.events import Retire
from trivet.wire.rollouts import RolloutRecord
from trivet.wire.versions import PolicyVersion

_ONCE, _VERSIONS, _READERS, _RECORD = (
    Invariant.EXACTLY_ONCE,
    Invariant.VERSIONS_TELL_THE_TRUTH,
    Invariant.READERS_ARE_SAFE,
    Invariant.INTACT_RECORD,
)
_MEAN_TOLERANCE = 1e-9
"""Relative and absolute tolerance between two means of the same rewards, which may be added in different orders."""


def compare_weights(history: RunHistory, layout: RunLayout, versions: Sequence[PolicyVersion]) -> None:
    """Compare the policies in weights/ with those that were published and removed.

    Args:
        versions: the policies that were in weights/ before the history was read.
    """
    policies, require = history.policies, history.ledger.require
    for version in versions:
        directory = layout.weights_step(version)
        is_there = (directory / STABLE).exists()
        try:
            manifest = verify(directory)
        except WeightsError as exc:
            if is_there:
                require(False, _READERS, str(exc))
            continue
        published = policies.published.get(version)
        if version in policies.retired:
            require(not is_there, _READERS, f"policy {version} was removed, and {directory} is there")
        elif published is not None or version > history.outline.first_step:  # older ones are of the run that was forked
            require(
                published == manifest.digest,
                _VERSIONS,
                f"{directory} has digest {manifest.digest[:12]}; published under {version} is {(published or 'nothing')[:12]}",
            )
            require(
                manifest.run_id == history.run_id,
                _RECORD,
                f"{directory / MANIFEST} is of run {manifest.run_id!r}, the history of {history.run_id!r}",
            )
            found = hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()
            known = policies.manifests.get(version, set()) - {""}
            require(not known or found in known, _VERSIONS, f"{directory / MANIFEST} is not the one that was published")
            deltas = {delta.name: delta.file for delta in manifest.deltas}
            difference = explain_difference(directory, deltas)
            require(not difference, _VERSIONS, f"{directory} is not what was published: {difference}")
            added = sorted(set(list_files(directory)) - {MANIFEST, STABLE, *deltas, *manifest.files})
            require(not added, _READERS, f"{directory} holds {added[:3]}, which nobody published")


def require_published(history: RunHistory, layout: RunLayout, *, is_live: bool) -> None:
    """Require that every policy that was published and not removed is there."""
    published, found = history.policies.published, published_versions(layout)
    missing = [version for version in sorted(published) if version not in found]
    if missing and is_live:
        since = [line.event for line in read_lines(layout.events, first=history.outline.num_bytes)]
        removed = {event.version for event in since if isinstance(event, Retire)}
        missing = [version for version in missing if version not in removed]
    # A policy is removed before the event is written. So each attempt that was cut short may have removed one policy without
    # an event, older than the step that the next attempt went back to. A policy is published after the event is written. So
    # the newest one may be missing if the last attempt was cut short.
    cuts = sorted(history.roles.starts_after_cut.get(history.trainer_role, []))
    newest = max(published, default=0)
    is_cut_short = history.roles.is_cut_short(history.trainer_role)
    if is_cut_short:
        cuts.append(newest)
        missing = [version for version in missing if version != newest]
    for version in reversed(missing):
        directory = layout.weights_step(PolicyVersion(version))
        if cuts and version < cuts[-1] and (is_cut_short or not directory.exists()):
            cuts.pop()
            continue
        history.ledger.require(
            False, _READERS, f"policy {version} was published and not removed; {directory} is not there, or not complete"
        )
    history.ledger.checks += len(published)


def compare_rollouts(
    history: RunHistory, layout: RunLayout, steps: Sequence[int], *, group_size: int | None, is_live: bool
) -> None:
    """Compare the rollouts of each step with the batch that was formed for it.

    Args:
        steps: the steps whose files were there before the history was read.
        group_size: rollouts of each group; None if it is unknown.
        is_live: the run is still running, and may remove files meanwhile.
    """
    ledger, groups = history.ledger, history.groups
    for step in steps:
        if (formed := groups.formed.get(step)) is not None:
            with suppress(*([FileNotFoundError] if is_live else [])):
                _compare_step(history, layout, step, formed, group_size=group_size)
        else:  # just after a start, the files of steps that are done again may not be removed yet
            ledger.require(
                is_live or not groups.num_since_start or step <= history.outline.first_step,
                _ONCE,
                f"{layout.rollouts_step(step)} holds rollouts, and the history forms no batch {step}",
            )
    for step in sorted(groups.rollouts.keys() - set(steps)):
        ledger.require(is_live, _ONCE, f"the rollouts of step {step} were written, and {layout.rollouts_step(step)} has none")
    if num_unrecorded := len(set(steps) - groups.rollouts.keys()):
        ledger.not_examined.append(f"texts and scores in the rollouts of {num_unrecorded:,} steps: the history has no digest")


def _compare_step(
    history: RunHistory, layout: RunLayout, step: int, groups: Mapping[int, LiveGroup], *, group_size: int | None
) -> None:
    """Compare the files in rollouts/step_N/ with the groups of batch N, as they were when it was formed."""
    require, directory = history.ledger.require, layout.rollouts_step(step)
    if (written := history.groups.rollouts.get(step)) is not None:
        names = [name for name in list_files(directory) if not name.startswith(".")]  # hidden files are left by a killed writer
        require(
            digest_of(hash_files(directory, names)) == written.digest,
            _RECORD,
            f"the files in {directory} are not those that were written there: one was changed, added or removed",
        )
    path, decoder = directory / ROLLOUTS_FILE, msgspec.json.Decoder(RolloutRecord)
    rollouts_by_group: dict[int, list[RolloutRecord]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                rollout = decoder.decode(line)
            except DECODE_ERRORS as exc:
                require(False, _RECORD, f"{path}:{number} is no rollout: {exc}")
                return
            if not require(line.endswith(b"\n"), _RECORD, f"{path}:{number} is cut short"):
                return
            rollouts_by_group.setdefault(-1 if rollout.group_id is None else rollout.group_id, []).append(rollout)
    missing, added = sorted(groups.keys() - rollouts_by_group.keys()), sorted(rollouts_by_group.keys() - groups.keys())
    parts = [f"not {missing[:8]}"] * bool(missing) + [f"also {added[:8]}"] * bool(added)
    require(not parts, _ONCE, f"{path} holds other groups ({' but '.join(parts)}) than step {step} trained")
    all_rollouts = [rollout for rollouts in rollouts_by_group.values() for rollout in rollouts]
    newest = max((run.version for rollout in all_rollouts for run in rollout.versions), default=0)
    require(
        newest < step or history.groups.is_replay,
        _VERSIONS,
        f"{path} holds tokens of policy {newest}; step {step} trained before it existed",
    )
    for group_id in sorted(rollouts_by_group.keys() & groups.keys()):
        name = f"group {group_id} in {path}"
        _compare_group(history.ledger, name, rollouts_by_group[group_id], groups[group_id], group_size=group_size)


def _compare_group(
    ledger: Ledger, name: str, rollouts: Sequence[RolloutRecord], group: LiveGroup, *, group_size: int | None
) -> None:
    """Compare the rollouts of one group with its events: indices, example, mean reward and versions."""
    indices = [rollout.index for rollout in rollouts]
    ledger.require(
        indices == list(range(group_size or len(rollouts))),
        _ONCE,
        f"{name} has the rollouts {indices[:8]} of {group_size or 'an unknown number'}",
    )
    if not group.env:
        return  # a group of another run's checkpoint, of which this history knows only the id
    first = rollouts[0]
    ledger.require(
        all((rollout.env, rollout.example_id) == (group.env, group.example_id) for rollout in rollouts),
        _ONCE,
        f"{name} is of example {(first.env, first.example_id)}; it was dispatched as {(group.env, group.example_id)}",
    )
    mean = math.fsum(rollout.reward for rollout in rollouts) / len(rollouts)
    ledger.require(
        math.isclose(mean, group.reward_mean, rel_tol=_MEAN_TOLERANCE, abs_tol=_MEAN_TOLERANCE),
        _ONCE,
        f"{name} has the mean reward {mean:.9g}; it finished with {group.reward_mean:.9g}",
    )
    versions = [run.version for rollout in rollouts for run in rollout.versions]
    found = (min(versions, default=-1), max(versions, default=-1))
    ledger.require(
        found == (group.oldest, group.newest),
        _VERSIONS,
        f"{name} holds tokens of policies {found[0]} to {found[1]}; it finished with {group.oldest} to {group.newest}",
    )
