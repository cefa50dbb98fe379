"""Compares the files of a run with its history: the run's identity, the history's length, and checkpoints."""

import tomllib
from typing import Any

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
from trivet.checkpoints.orchestrator_part import read_pending_groups
from trivet.checkpoints.run_record import read_run
from trivet.config.layout import COMMITTED, ROLLOUTS_FILE, RunLayout
from trivet.errors import CheckpointError
from trivet.history.ledger import Invariant
from trivet.history.published import compare_rollouts, compare_weights, require_published
from trivet.history.run_history import SFT, RunHistory
from trivet.process.lock import holder_of
from trivet.step_directories import list_steps
from trivet.storage.durable import DECODE_ERRORS, list_files
from trivet.weights.catalog import published_versions
from trivet.wire.events import Stop
from trivet.wire.status import RunState, RunStatus
from trivet.wire.versions import Step

_COMMIT, _ONCE, _RECORD = Invariant.ONE_COMMIT, Invariant.EXACTLY_ONCE, Invariant.INTACT_RECORD


class Files:
    """The files of a run, listed before its history is read, so that the history has the events of all of them.

    A running run may remove a listed file before it is compared. Then that file is skipped.
    """

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.commits = committed_steps(layout)
        self.weights = published_versions(layout)
        self.rollouts = list(list_steps(layout.rollouts, marker=ROLLOUTS_FILE))
        self.has_launcher = layout.run_file.exists()
        roles = (TRAINER, ORCHESTRATOR, SFT)
        self.is_live = any(holder_of(lock) is not None for lock in (layout.lock, *map(layout.role_lock, roles)))
        try:
            self._status = msgspec.json.decode(layout.status.read_bytes(), type=RunStatus)
        except (OSError, *DECODE_ERRORS):
            self._status = None
        self._config_problems: list[str] = []
        self.configs: dict[str, dict[str, Any]] = {}
        """The configuration of each role's last attempt, by role. A role whose file is missing or cannot be read is left out."""
        for file in [layout.configs / f"{role}.toml" for role in roles]:
            try:
                if file.exists():
                    self.configs[file.stem] = tomllib.loads(file.read_text())
            except (OSError, ValueError, RecursionError) as exc:
                self._config_problems.append(f"{file} cannot be read: {exc}")

    def compare(self, history: RunHistory) -> None:
        """Compare the files with the history, and record each contradiction in the history's ledger."""
        history.ledger.line = None
        self._compare_identity(history)
        self._compare_length(history)
        self._compare_commits(history)
        if not self.is_live:
            self._require_kept_commits(history)
        compare_weights(history, self.layout, self.weights)
        require_published(history, self.layout, is_live=self.is_live)
        size = self.configs.get(ORCHESTRATOR, {}).get("rollouts_per_example")
        group_size = size if isinstance(size, int) else None
        compare_rollouts(history, self.layout, self.rollouts, group_size=group_size, is_live=self.is_live)
        for problem in self._config_problems:
            history.ledger.require(False, _RECORD, problem)

    def _compare_identity(self, history: RunHistory) -> None:
        require, path = history.ledger.require, self.layout.run_file
        if self._status is not None:
            require(self.has_launcher, _RECORD, f"{path} is not there, and the launcher's {self.layout.status.name} is")
        if not self.has_launcher:
            return
        if (run := read_run(self.layout)) is None:
            require(False, _RECORD, f"{path} cannot be read: it is damaged, or of another version of trivet")
            return
        require(history.run_id in ("", run.id), _RECORD, f"{path} is of run {run.id!r}, the history of {history.run_id!r}")
        last_attempt = max((event.attempt for event in history.roles.last.values()), default=0)
        is_counted = last_attempt <= run.attempt or self.is_live
        require(is_counted, _RECORD, f"{path} counts {run.attempt} attempts, the history {last_attempt}")

    def _compare_length(self, history: RunHistory) -> None:
        """Compare the end of the history with the launcher's last status."""
        ledger, outline, status = history.ledger, history.outline, self._status
        if outline.num_torn and not self.is_live:
            ledger.remarks.append(
                f"the last line is torn after {outline.num_torn:,} bytes: its writer was killed or the disk was full, or it was cut"
            )
        if status is None or status.run_id != history.run_id:
            ledger.not_examined.append("whether the end of the history is missing: the run has no status.json")
            return
        ledger.require(
            outline.num_bytes >= status.events_bytes,
            _RECORD,
            f"events.jsonl has {outline.num_bytes:,} bytes of lines; status.json saw {status.events_bytes:,}: its end is gone",
        )
        if status.state is RunState.DONE and not self.is_live:
            for role in status.roles:
                if role.name in PARTS and role.exit.endswith("exit code 0"):
                    ledger.require(
                        isinstance(history.roles.last.get(role.name), Stop),
                        _RECORD,
                        f"status.json says that the {role.name} ended in order; the history has no stop of it",
                    )

    def _compare_commits(self, history: RunHistory) -> None:
        require, recorded = history.ledger.require, history.commits
        newest = max(recorded, default=0)
        if newest:
            require(
                any(step >= newest for step in self.commits),
                _COMMIT,
                f"step {newest} is the last commit of the history, and {self.layout.checkpoint_step(Step(newest))} is not there",
            )
        for step in self.commits:
            directory = self.layout.checkpoint_step(step)
            require(
                step in recorded or history.may_have_committed(step),
                _COMMIT,
                f"{directory} is committed; the history has no commit of step {step}",
            )
            try:
                self._compare_commit(history, step)
            except CheckpointError as exc:
                if (directory / COMMITTED).exists():
                    require(False, _COMMIT, str(exc))

    def _compare_commit(self, history: RunHistory, step: Step) -> None:
        """Compare a checkpoint's parts, record, files and groups with the history. Raises CheckpointError if it is damaged."""
        require, directory = history.ledger.require, self.layout.checkpoint_step(step)
        parts = set(verify_checkpoint(self.layout, step).parts)
        expected = set(PARTS if history.groups.state.step else (TRAINER,))
        message = f"checkpoint {step} has the parts {sorted(parts)}; it must have {sorted(expected)}"
        require(parts == expected, _COMMIT, message)
        record = read_record(self.layout, step)
        require(
            # the first checkpoint of a fork is that of another run
            record.run_id in ("", history.run_id) or step == history.outline.first_step,
            _RECORD,
            f"{directory} was committed by run {record.run_id!r}; the history is of {history.run_id!r}",
        )
        message = f"{directory / COMMITTED} is not the record that the history has of this commit"
        require(history.commits.get(step) in (None, "", record.digest), _RECORD, message)
        listed = {COMMITTED}
        for name in PARTS:
            if (directory / name).exists():
                listed |= {f"{name}/{file}" for file in (DONE, *read_listing(directory / name).files)}
        added = sorted(set(list_files(directory)) - listed)
        require(not added, _COMMIT, f"{directory} holds {added[:3]}, which nobody committed")
        pending = history.groups.pending_after(step)
        if ORCHESTRATOR not in parts or pending is None:
            return
        found = read_pending_groups(self.layout, step)
        for name, in_history, in_checkpoint in (
            ("ready", pending.ready, found.ready),
            ("in flight", pending.in_flight, found.in_flight),
        ):
            difference = sorted(in_history ^ in_checkpoint)
            message = f"groups {difference[:8]} are {name} after batch {step} in one of history and checkpoint, not in both"
            require(not difference, _ONCE, message)
        next_ids = pending.next_group_id, found.next_group_id
        message = f"the group after batch {step} is {next_ids[0]} in the history and {next_ids[1]} in the checkpoint"
        require(next_ids[0] == next_ids[1], _ONCE, message)

    def _require_kept_commits(self, history: RunHistory) -> None:
        """Require that each committed checkpoint is there, except those that retention removes."""
        ledger = history.ledger
        missing: list[int] = []
        for step in sorted(history.commits):
            directory = self.layout.checkpoint_step(Step(step))
            if not directory.exists():
                missing.append(step)
            elif not (directory / COMMITTED).exists():
                is_removing = history.roles.is_cut_short(history.trainer_role) and step != max(history.commits)
                message = f"step {step} is committed in the history, and {directory} has no {COMMITTED}"
                ledger.require(is_removing, _COMMIT, message)
        config = self.configs.get(history.trainer_role, {}).get("ckpt")
        if isinstance(config, dict):
            removable = removable_steps(
                sorted({*self.commits, *map(Step, history.commits)}),
                keep_last=config.get("keep_last"),  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
                keep_interval=config.get("keep_interval"),  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            )
            for step in history.recent_commits.intersection(missing):
                message = f"step {step} is committed in the history and was to be kept; its directory is gone"
                ledger.require(step in removable, _COMMIT, message)
        elif missing:
            ledger.not_examined.append(
                f"whether {len(missing)} committed checkpoints were rightly removed: no configuration tells what is kept"
            )
