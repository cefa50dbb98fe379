"""Compares the files of a run with its history: checkpoints, published policies, the rollouts of each step."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from trivet.checkpoints.commit import committed_steps, verify_checkpoint
from trivet.checkpoints.halves import HALVES, ORCHESTRATOR, TRAINER
from trivet.config.layout import COMMITTED, STABLE, RunLayout, parse_step
from trivet.errors import CheckpointError, MessageRefused, WeightsError
from trivet.history.breaches import Invariant
from trivet.history.groups import Owed
from trivet.history.replay import Replay
from trivet.history.steps import fingerprint
from trivet.orchestrator.checkpoint import OrchestratorHalf
from trivet.weights.catalog import published_versions
from trivet.weights.manifest import verify
from trivet.wire.codec import decode
from trivet.wire.versions import Step, VersionRun

_COMMIT, _VERSIONS, _READERS, _ONCE = (
    Invariant.ONE_COMMIT,
    Invariant.VERSIONS_TELL_THE_TRUTH,
    Invariant.READERS_ARE_SAFE,
    Invariant.EXACTLY_ONCE,
)

_STATE_FILE = "state.msgpack"


class _RolloutLine(msgspec.Struct):
    """What of a line of rollouts.jsonl is compared."""

    group_id: int
    versions: list[VersionRun] = []


class Files:
    """What lay in the directory before the history was read: anything there has its event by then.

    A running run may remove what was seen; what is gone when its turn comes is passed over.
    """

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.commits = committed_steps(layout)
        self.weights = published_versions(layout)
        self.rollouts = sorted(_rollout_steps(layout))

    def owed(self, step: Step) -> Owed:
        """The groups in the orchestrator's half of a committed step.

        Raises:
            CheckpointError: it cannot be read.
        """
        path = self.layout.checkpoint_step(step) / ORCHESTRATOR / _STATE_FILE
        try:
            half = decode(path.read_bytes(), OrchestratorHalf)
        except (OSError, MessageRefused) as exc:
            raise CheckpointError(f"{path} cannot be read: {exc}") from exc
        return Owed(
            next_group_id=half.next_group_id,
            ready=frozenset(group.group_id for group in half.buffer.ready),
            in_flight=frozenset(half.buffer.in_flight_ids),
        )

    def compare(self, replay: Replay) -> None:
        replay.ledger.line = None
        self._compare_commits(replay)
        self._compare_weights(replay)
        self._compare_rollouts(replay)

    def _compare_commits(self, replay: Replay) -> None:
        said = replay.steps.commits
        newest = max(said, default=None)
        self._require_newest(replay, newest)
        for step in self.commits:
            replay.ledger.require(
                step in said or replay.steps.may_have_committed(step),
                _COMMIT,
                f"{self.layout.checkpoint_step(step)} is committed; the history has no commit of step {step}",
            )
            try:
                record = verify_checkpoint(self.layout, step)
                expected = HALVES if replay.groups.last_batch else (TRAINER,)
                replay.ledger.require(
                    set(record.halves) == set(expected),
                    _COMMIT,
                    f"checkpoint {step} has the halves {sorted(record.halves)}; it must have {sorted(expected)}",
                )
                self._compare_owed(replay, step)
            except CheckpointError as exc:
                if self._has_commit(step):
                    replay.ledger.require(False, _COMMIT, str(exc))

    def _require_newest(self, replay: Replay, newest: int | None) -> None:
        if newest is not None:
            replay.ledger.require(
                newest in self.commits or any(step > newest for step in self.commits),
                _COMMIT,
                f"step {newest} is the last commit of the history, and {self.layout.checkpoint_step(newest)} is not there",
            )

    def _compare_owed(self, replay: Replay, step: Step) -> None:
        said = replay.groups.owed_after(step)
        if said is None:
            return
        found = self.owed(step)
        for name, expected, held in (("ready", said.ready, found.ready), ("in flight", said.in_flight, found.in_flight)):
            difference = sorted(expected ^ held)
            replay.ledger.require(
                not difference,
                _ONCE,
                f"groups {difference[:8]} are {name} after batch {step} in one of history and checkpoint, not in both",
            )
        replay.ledger.require(
            said.next_group_id == found.next_group_id,
            _ONCE,
            f"the group after batch {step} is {said.next_group_id} in the history and {found.next_group_id} in the checkpoint",
        )

    def _compare_weights(self, replay: Replay) -> None:
        policies = replay.policies
        for version in self.weights:
            directory = self.layout.weights_step(version)
            try:
                manifest = verify(directory)
            except WeightsError as exc:
                if (directory / STABLE).exists():
                    replay.ledger.require(False, _READERS, str(exc))
                continue
            if version in policies.retired:
                replay.ledger.require(
                    not (directory / STABLE).exists(), _READERS, f"policy {version} was removed, and {directory} is there"
                )
                continue
            replay.ledger.require(
                policies.published.get(version) == manifest.digest,
                _VERSIONS,
                f"{directory} has digest {manifest.digest[:12]}; published under {version} is "
                f"{policies.published.get(version, 'nothing')[:12]}",
            )

    def _compare_rollouts(self, replay: Replay) -> None:
        for step in self.rollouts:
            trained = replay.steps.fingerprints.get(step)
            if trained is None:
                continue  # of a step that was not trained yet, or happens again
            path = self.layout.rollouts_step(step) / "rollouts.jsonl"
            groups: set[int] = set()
            newest = 0
            for line in _read_rollouts(path):
                groups.add(line.group_id)
                newest = max(newest, *(run.version for run in line.versions), 0)
            replay.ledger.require(
                fingerprint(sorted(groups)) == trained, _ONCE, f"{path} holds other groups than step {step} trained"
            )
            replay.ledger.require(
                newest < step, _VERSIONS, f"{path} holds tokens of policy {newest}; step {step} trained before it existed"
            )

    def _has_commit(self, step: Step) -> bool:
        return (self.layout.checkpoint_step(step) / COMMITTED).exists()


def _rollout_steps(layout: RunLayout) -> Iterator[int]:
    for path in layout.root.glob("rollouts/step_*/rollouts.jsonl"):
        if (step := parse_step(path.parent.name)) is not None:
            yield step


def _read_rollouts(path: Path) -> Iterator[_RolloutLine]:
    decoder = msgspec.json.Decoder(_RolloutLine)
    with path.open("rb") as file:
        for line in file:
            yield decoder.decode(line)
