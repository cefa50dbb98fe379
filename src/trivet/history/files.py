"""Compares the files of a run with its history: the run's identity, the history's length, and checkpoints."""

import tomllib
from pathlib import Path
from typing import Any, cast

import msgspec

from trivet.checkpoints.commit import (
    DONE,
    ORCHESTRATOR,
    PARTS,
    TRAINER,
    committed_steps,
    read_listing,
    read_record,
    removable_steps,
    verify_checkpoint,
)
from trivet.checkpoints.orchestrator_part import read_owed_groups
from trivet.config.layout import COMMITTED, ROLLOUTS_FILE, RunLayout
from trivet.errors import CheckpointError
from trivet.history.breaches import Invariant
from trivet.history.published import compare_rollouts, compare_weights, require_published
from trivet.history.record import Extent
from trivet.history.replay import Replay
from trivet.process.lock import holder_of
from trivet.step_directories import list_steps
from trivet.storage.durable import DECODE_ERRORS, list_files
from trivet.weights.catalog import published_versions
from trivet.wire.status import RunState, RunStatus
from trivet.wire.versions import Step

_COMMIT, _VERSIONS, _READERS, _ONCE, _RECORD = (
    Invariant.ONE_COMMIT,
    Invariant.VERSIONS_TELL_THE_TRUTH,
    Invariant.READERS_ARE_SAFE,
    Invariant.EXACTLY_ONCE,
    Invariant.INTACT_RECORD,
)

_SFT = "sft"


class _RunFile(msgspec.Struct):
    """The fields of run.json that are compared."""

    id: str
    attempt: int


class Files:
    """Lists what lay in the directory before the history was read: all of it has its event by then.

    A running run may remove what was seen; what is gone when its turn comes is passed over.
    """

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.commits = committed_steps(layout)
        self.weights = published_versions(layout)
        self.rollouts = list(list_steps(layout.rollouts, marker=ROLLOUTS_FILE))
        self.status = _read_status(layout)
        self.has_launcher = layout.run_file.exists()
        self.problems: list[str] = []
        """The problems met while configurations were read."""
        self.is_live = any(
            holder_of(lock) is not None
            for lock in (layout.lock, *(layout.role_lock(role) for role in (TRAINER, ORCHESTRATOR, _SFT)))
        )

    def section(self, role: str, name: str) -> dict[str, Any]:
        """Return a section of the configuration of the role's last attempt; empty when there is none to read."""
        found = self.config(role).get(name)
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def config(self, role: str) -> dict[str, Any]:
        """The configuration of the role's last attempt; empty when there is none to read."""
        file = self.layout.configs / f"{role}.toml"
        if not file.exists():
            return {}
        try:
            return tomllib.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as exc:
            problem = f"{file} cannot be read: {exc}"
            if problem not in self.problems:
                self.problems.append(problem)
            return {}

    def compare(self, replay: Replay, extent: Extent) -> None:
        """Record in the replay's ledger what the files say otherwise than the history."""
        ledger = replay.ledger
        ledger.line = None
        self._compare_identity(replay)
        self._compare_length(replay, extent)
        self._compare_commits(replay)
        self._require_kept_commits(replay)
        compare_weights(replay, self.layout, self.weights)
        require_published(replay, self.layout, extent, is_live=self.is_live)
        size = self.config(ORCHESTRATOR).get("rollouts_per_example")
        group_size = size if isinstance(size, int) else None
        compare_rollouts(replay, self.layout, self.rollouts, group_size=group_size, is_live=self.is_live)
        for problem in self.problems:
            ledger.require(False, _RECORD, problem)

    def _compare_identity(self, replay: Replay) -> None:
        ledger, path = replay.ledger, self.layout.run_file
        if self.status is not None:
            ledger.require(self.has_launcher, _RECORD, f"{path} is not there, and the launcher's {self.layout.status.name} is")
        if self.has_launcher:
            try:
                run = msgspec.json.decode(path.read_bytes(), type=_RunFile)
            except (OSError, *DECODE_ERRORS) as exc:
                ledger.require(False, _RECORD, f"{path} cannot be read: {exc}")
            else:
                ledger.require(
                    replay.run_id in ("", run.id), _RECORD, f"{path} is of run {run.id!r}, the history of {replay.run_id!r}"
                )
                ledger.require(
                    replay.roles.last_attempt <= run.attempt or self.is_live,
                    _RECORD,
                    f"{path} counts {run.attempt} attempts, the history {replay.roles.last_attempt}",
                )

    def _compare_length(self, replay: Replay, extent: Extent) -> None:
        """Compare the end of the history with the launcher's last status."""
        ledger, status = replay.ledger, self.status
        if extent.num_torn and not self.is_live:
            ledger.remarks.append(
                f"the last line is torn after {extent.num_torn:,} bytes: its writer was killed or the disk was full, or it was cut"
            )
        if status is None or status.run_id != replay.run_id:
            ledger.not_examined.append("whether the end of the history is missing: no status.json of the run tells")
            return
        ledger.require(
            extent.num_bytes >= status.events_bytes,
            _RECORD,
            f"events.jsonl has {extent.num_bytes:,} bytes of lines; status.json saw {status.events_bytes:,}: its end is gone",
        )
        if status.state is not RunState.DONE or self.is_live:
            return
        for role in status.roles:
            attempt = replay.roles.attempt_of(role.name)
            if role.name in (ORCHESTRATOR, TRAINER) and role.exit.endswith("exit code 0"):
                ledger.require(
                    attempt is not None and replay.roles.has_stopped(role.name),
                    _RECORD,
                    f"status.json says that the {role.name} ended in order; the history has no stop of it",
                )

    def _compare_commits(self, replay: Replay) -> None:
        recorded = replay.steps.commits
        newest = max(recorded, default=None)
        if newest is not None:
            replay.ledger.require(
                newest in self.commits or any(step > newest for step in self.commits),
                _COMMIT,
                f"step {newest} is the last commit of the history, and {self.layout.checkpoint_step(newest)} is not there",
            )
        for step in self.commits:
            replay.ledger.require(
                step in recorded or replay.steps.may_have_committed(step),
                _COMMIT,
                f"{self.layout.checkpoint_step(step)} is committed; the history has no commit of step {step}",
            )
            try:
                record = verify_checkpoint(self.layout, step)
                expected = PARTS if replay.groups.last_batch else (TRAINER,)
                replay.ledger.require(
                    set(record.parts) == set(expected),
                    _COMMIT,
                    f"checkpoint {step} has the parts {sorted(record.parts)}; it must have {sorted(expected)}",
                )
                self._compare_record(replay, step)
                self._refuse_added(replay, step)
                if ORCHESTRATOR in record.parts:
                    self._compare_owed(replay, step)
            except CheckpointError as exc:
                if (self.layout.checkpoint_step(step) / COMMITTED).exists():
                    replay.ledger.require(False, _COMMIT, str(exc))

    def _compare_record(self, replay: Replay, step: Step) -> None:
        """Require that COMMITTED is the record of this run that the history's commit names."""
        record, directory = read_record(self.layout, step), self.layout.checkpoint_step(step)
        is_of_another = step == replay.first_step  # a fork's own first checkpoint
        replay.ledger.require(
            record.run_id in ("", replay.run_id) or is_of_another,
            _RECORD,
            f"{directory} was committed by run {record.run_id!r}; the history is of {replay.run_id!r}",
        )
        digest = replay.steps.commits.get(step)
        if digest:
            replay.ledger.require(
                digest == record.digest,
                _RECORD,
                f"{directory / COMMITTED} is not the record that the history's commit tells of",
            )

    def _refuse_added(self, replay: Replay, step: Step) -> None:
        directory = self.layout.checkpoint_step(step)
        listed = {COMMITTED}
        for name in PARTS:
            if (directory / name).exists():
                listed |= {f"{name}/{file}" for file in (DONE, *read_listing(directory / name).files)}
        added = sorted(set(list_files(directory)) - listed)
        replay.ledger.require(not added, _COMMIT, f"{directory} holds {added[:3]}, which nobody committed")

    def _require_kept_commits(self, replay: Replay) -> None:
        """Every commit is there that retention does not remove."""
        if self.is_live:
            return
        ledger = replay.ledger
        for step in sorted(replay.steps.commits):
            directory = self.layout.checkpoint_step(Step(step))
            if directory.exists() and not (directory / COMMITTED).exists():
                is_removing = replay.roles.is_cut_short(replay.trainer_role) and step != max(replay.steps.commits)
                ledger.require(
                    is_removing, _COMMIT, f"step {step} is committed in the history, and {directory} has no {COMMITTED}"
                )
        config = self.section(replay.trainer_role, "ckpt")
        missing = sorted(step for step in replay.steps.commits if not self.layout.checkpoint_step(Step(step)).exists())
        if not isinstance(self.config(replay.trainer_role).get("ckpt"), dict):
            if missing:
                ledger.not_examined.append(
                    f"whether {len(missing)} committed checkpoints were rightly removed: no configuration tells what is kept"
                )
            return
        removable = removable_steps(
            sorted({*self.commits, *map(Step, replay.steps.commits)}),
            keep_last=config.get("keep_last"),
            keep_interval=config.get("keep_interval"),
        )
        for step in missing:
            if step in replay.steps.recent:
                ledger.require(
                    step in removable,
                    _COMMIT,
                    f"step {step} is committed in the history and was to be kept; its directory is gone",
                )

    def _compare_owed(self, replay: Replay, step: Step) -> None:
        expected = replay.groups.owed_after(step)
        if expected is None:
            return
        found = read_owed_groups(self.layout, step)
        for name, in_history, in_checkpoint in (
            ("ready", expected.ready, found.ready),
            ("in flight", expected.in_flight, found.in_flight),
        ):
            difference = sorted(in_history ^ in_checkpoint)
            replay.ledger.require(
                not difference,
                _ONCE,
                f"groups {difference[:8]} are {name} after batch {step} in one of history and checkpoint, not in both",
            )
        replay.ledger.require(
            expected.next_group_id == found.next_group_id,
            _ONCE,
            f"the group after batch {step} is {expected.next_group_id} in the history and {found.next_group_id} in the checkpoint",
        )


def _read_status(layout: RunLayout) -> RunStatus | None:
    try:
        return msgspec.json.decode(Path(layout.status).read_bytes(), type=RunStatus)
    except (OSError, *DECODE_ERRORS):
        return None
