"""Run the loop on recorded groups, with a trainer that acknowledges every batch at once."""

import asyncio
from pathlib import Path

import pytest

from support.groups import make_group
from support.transport_ends import ReadyTrainer
from trivet.checkpoints.commit import TRAINER, begin_part, commit, finish_part
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.shared import CkptConfig, RunIdentity
from trivet.errors import BatchError, CheckpointError
from trivet.history.record import Outline
from trivet.history.run_history import RunHistory
from trivet.orchestrator.assembly import make_replay_loop
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.checkpoint import OrchestratorPart, RunTotals, read_part, write_rollouts
from trivet.orchestrator.sampler import SamplerState
from trivet.telemetry.events import read_events
from trivet.telemetry.telemetry import Telemetry
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.events import Start, Stop
from trivet.wire.rollouts import Group
from trivet.wire.versions import Step

FLAT = (1.0, 1.0)


def fresh() -> OrchestratorPart:
    return OrchestratorPart(progress=RunTotals(), sampler=SamplerState(), buffer=BufferState(), rollouts_per_example=2)


def record(root: Path, *steps: list[Group], run_id: str = "first") -> Path:
    for step, groups in enumerate(steps, start=1):
        write_rollouts(RunLayout(root / run_id), Step(step), groups, run_id=run_id, is_replayable=True)
    return root / run_id


def replay(root: Path, record: Path, part: OrchestratorPart, *, max_steps: int | None = None, attempt: int = 1) -> list[Batch]:
    config = OrchestratorConfig.model_validate(
        {
            "output_dir": root / "new",
            "replay": record,
            "run": RunIdentity(attempt=attempt),
            "max_steps": max_steps,
            "batch_size": 4,
            "rollouts_per_example": 2,
            "max_off_policy_steps": 1,
            "max_async_level": 1,
            "ckpt": CkptConfig(interval=1),
            "buffer": {"online_difficulty_filtering": True},
        }
    )
    _layout, sender = RunLayout(config.output_dir), ReadyTrainer()
    telemetry = Telemetry("orchestrator", config)
    telemetry.write_event(Start(run_id="new", from_step=part.progress.step, replayed_run="first"))
    reason = "failed"
    try:
        loop = make_replay_loop(config, part, sender=sender, telemetry=telemetry)
        asyncio.run(loop.run())
        reason = "exhausted" if loop.is_exhausted else "done"
    finally:
        telemetry.write_event(Stop(step=Step(len(sender.batches)), reason=reason))
        telemetry.close()
    return sender.batches


def breaches_of(root: Path) -> list[str]:
    events = list(read_events(RunLayout(root / "new").events))
    starts = frozenset(int(event.from_step) for event in events if isinstance(event, Start))
    checker = RunHistory(Outline(start_steps=starts, has_orchestrator=True), max_off_policy_steps=1)
    for line, event in enumerate(events, start=1):
        checker.read(event, line=line)
    return [breach.reason for breach in checker.ledger.breaches]


def test_recorded_groups_are_trained_once_in_their_order_and_the_run_ends_with_them(tmp_path: Path) -> None:
    source = record(tmp_path, [make_group(7), make_group(3)], [make_group(5, version=1), make_group(9, version=40)])
    batches = replay(tmp_path, source, fresh())
    assert [(batch.step, batch.purpose) for batch in batches] == [
        (1, BatchPurpose.TRAIN),
        (2, BatchPurpose.TRAIN),
        (3, BatchPurpose.END),
    ]
    assert [batch.group_ids for batch in batches] == [[0, 1], [2, 3], []]
    assert set(batches[0].micro_batches[0].advantages_T) == {-0.5, 0.5}
    assert breaches_of(tmp_path) == []


def test_a_filter_of_today_applies_and_a_rest_too_small_for_a_batch_is_left(tmp_path: Path) -> None:
    source = record(tmp_path, [make_group(0, FLAT), make_group(1)], [make_group(2), make_group(3)])
    batches = replay(tmp_path, source, fresh())
    assert [batch.group_ids for batch in batches] == [[1, 2], []]
    assert batches[-1].purpose is BatchPurpose.END
    assert breaches_of(tmp_path) == []


def test_the_last_step_ends_the_run_before_its_record(tmp_path: Path) -> None:
    source = record(tmp_path, [make_group(0), make_group(1)], [make_group(2), make_group(3)])
    assert [batch.purpose for batch in replay(tmp_path, source, fresh(), max_steps=1)] == [BatchPurpose.TRAIN]


def test_a_resumed_replay_goes_on_behind_the_groups_of_its_checkpoint(tmp_path: Path) -> None:
    source = record(tmp_path, [make_group(0), make_group(1, FLAT), make_group(2)], [make_group(3), make_group(4)])
    replay(tmp_path, source, fresh(), max_steps=1)
    layout = RunLayout(tmp_path / "new")
    (begin_part(layout, Step(1), TRAINER) / "weights").write_text("w")
    finish_part(layout, Step(1), TRAINER)
    commit(layout, Step(1))
    part = read_part(layout, Step(1), rollouts_per_example=2)
    assert (part.sampler.next_group_id, part.sampler.replayed_run) == (3, "first")
    batches = replay(tmp_path, source, part, attempt=2)
    assert [batch.group_ids for batch in batches] == [[3, 4], []]
    assert breaches_of(tmp_path) == []


def test_a_checkpoint_of_another_record_is_refused(tmp_path: Path) -> None:
    other = record(tmp_path, [make_group(0)], run_id="other")
    part = fresh()
    part.sampler = SamplerState(replayed_run="first")
    with pytest.raises(CheckpointError, match=r"a replay of run 'first', and .* holds run 'other'"):
        replay(tmp_path, other, part)


def test_a_record_too_small_for_one_batch_is_an_error(tmp_path: Path) -> None:
    source = record(tmp_path, [make_group(0)])
    with pytest.raises(ExceptionGroup) as caught:
        replay(tmp_path, source, fresh())
    [error] = caught.value.exceptions
    assert isinstance(error, BatchError)
    assert "is used up after 1 groups" in str(error)
