"""Run the orchestrator's loop with groups that finish at once and real checkpoint parts on disk."""

import asyncio
import gc
import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from support.fake_servers import FakeServers
from support.groups import make_sample
from support.transport_ends import ReadyTrainer
from trivet.algorithms.advantages import mean_baseline
from trivet.checkpoints.commit import TRAINER, begin_part, commit, finish_part
from trivet.checkpoints.settings import DATA_FILE, DataRecord
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import BufferConfig, OrchestratorConfig
from trivet.config.schema.shared import CkptConfig, RunIdentity
from trivet.errors import BatchError
from trivet.orchestrator.buffer import BufferState, GroupBuffer
from trivet.orchestrator.checkpoint import OrchestratorPart, RunTotals, read_part
from trivet.orchestrator.dispatcher import ChangeEvent, Dispatcher
from trivet.orchestrator.loop import Loop
from trivet.orchestrator.sampler import Draw, ExampleSampler, SamplerState
from trivet.telemetry.events import read_events
from trivet.telemetry.telemetry import Telemetry
from trivet.wire.batches import Batch, BatchPurpose
from trivet.wire.events import BatchFormed, Dispatch, Finish
from trivet.wire.rollouts import Rollout
from trivet.wire.versions import GroupId, PolicyVersion, Step

DATA = {"toy": DataRecord(num_records=11, digest="d")}
EXAMPLES = {"toy": [f"hash-{index}" for index in range(11)]}
FRESH = OrchestratorPart(progress=RunTotals(), sampler=SamplerState(), buffer=BufferState(), rollouts_per_example=2)


class IdleWatcher:
    """A watcher whose servers serve the start model all along."""

    last_load_s = 0.0
    version = PolicyVersion(0)
    step = Step(1)

    async def run(self) -> None:
        await asyncio.Event().wait()


def run_loop(
    directory: Path,
    part: OrchestratorPart,
    *,
    max_steps: int,
    run_group,
    attempt: int = 1,
    rules: BufferConfig | None = None,
    preempt_after: int | None = None,
    before_send: Callable[[ReadyTrainer], Awaitable[None]] | None = None,
) -> list[Batch]:
    config = OrchestratorConfig(
        output_dir=directory,
        run=RunIdentity(attempt=attempt),
        max_steps=max_steps,
        batch_size=4,
        rollouts_per_example=2,
        oversampling_factor=2.0,
        max_async_level=8,
        max_fruitless_batches=2,
        seq_len=64,
        ckpt=CkptConfig(interval=2),
    )
    layout = RunLayout(directory)
    telemetry = Telemetry("orchestrator", config)
    sender = ReadyTrainer()
    fill_changed = ChangeEvent()
    buffer = GroupBuffer(
        write_event=telemetry.write_event,
        online_difficulty_filtering=False,
        max_off_policy_steps=config.max_off_policy_steps,
        ready=part.buffer.ready,
    )
    sampler = ExampleSampler(EXAMPLES, seed=config.seed, rules=rules, state=part.sampler)
    dispatcher = Dispatcher(
        config,
        sampler=sampler,
        buffer=buffer,
        run_group=run_group,
        servers=FakeServers(),
        advantage=mean_baseline,
        on_group_end=fill_changed.notify,
    )
    dispatcher.resume(part.buffer.in_flight)
    loop = Loop(
        config=config,
        layout=layout,
        progress=part.progress,
        sampler=sampler,
        buffer=buffer,
        dispatcher=dispatcher,
        watcher=IdleWatcher(),  # type: ignore[arg-type]  stands in for PolicyWatcher
        sender=sender,
        telemetry=telemetry,
        fill_changed=fill_changed,
        before_send=partial(before_send, sender) if before_send is not None else None,
        data=DATA,
    )
    sender.on_batch = lambda batch: loop.preempt() if batch.step == preempt_after else None
    try:
        asyncio.run(loop.run())
    finally:
        telemetry.close()
    return sender.batches


async def answer_at_once(draw: Draw, base_url: str) -> list[Rollout]:
    return [Rollout(index=index, reward=float(index), samples=[make_sample()]) for index in range(2)]


def commit_with_a_trainer_part(layout: RunLayout, step: int) -> None:
    (begin_part(layout, Step(step), TRAINER) / "weights").write_text("w")
    finish_part(layout, Step(step), TRAINER)
    commit(layout, Step(step))


def ids_in_flight(part) -> list[int]:
    return [draw.group_id for draw in part.buffer.in_flight]


def test_batches_are_whole_and_say_when_a_checkpoint_part_is_on_disk(tmp_path):
    thresholds = gc.get_threshold()
    batches = run_loop(tmp_path, FRESH, max_steps=5, run_group=answer_at_once)
    assert [batch.num_rollouts for batch in batches] == [4] * 5
    assert [batch.has_orchestrator_part for batch in batches] == [False, True, False, True, True]
    groups = [group_id for batch in batches for group_id in batch.group_ids]
    assert len(set(groups)) == 10
    assert all(set(batch.micro_batches[0].advantages_T) == {-0.5, 0.5} for batch in batches)
    assert gc.get_threshold() == thresholds


def test_servers_free_their_memory_before_each_batch_is_sent(tmp_path):
    num_sent: list[int] = []

    async def sleep(trainer: ReadyTrainer) -> None:
        num_sent.append(len(trainer.batches))

    run_loop(tmp_path, FRESH, max_steps=3, run_group=answer_at_once, before_send=sleep)
    assert num_sent == [0, 1, 2]
    steps = [json.loads(line) for line in (RunLayout(tmp_path).metrics / "orchestrator.jsonl").read_text().splitlines()]
    assert all("time/sleep_servers" in step for step in steps)


def test_a_preempted_run_writes_the_part_of_the_last_batch_and_says_stop(tmp_path):
    batches = run_loop(tmp_path, FRESH, max_steps=9, run_group=answer_at_once, preempt_after=3)
    assert [(batch.step, batch.purpose, batch.has_orchestrator_part) for batch in batches[2:]] == [
        (3, BatchPurpose.TRAIN, False),
        (4, BatchPurpose.PREEMPT, True),
    ]
    layout = RunLayout(tmp_path)
    commit_with_a_trainer_part(layout, 3)
    part = read_part(layout, Step(3), rollouts_per_example=2)
    assert part.progress.step == 3
    for step in (2, 3):  # of a checkpoint, and of the preemption
        (record,) = tmp_path.glob(f"checkpoints/*step_{step}*/orchestrator/{DATA_FILE}")
        assert msgspec.json.decode(record.read_bytes(), type=dict[str, DataRecord]) == DATA
    trained = {group_id for batch in batches for group_id in batch.group_ids}
    pending = {group.group_id for group in part.buffer.ready} | set(ids_in_flight(part))
    assert not trained & pending


def test_a_run_preempted_after_a_checkpoint_writes_no_other(tmp_path):
    batches = run_loop(tmp_path, FRESH, max_steps=9, run_group=answer_at_once, preempt_after=2)
    assert [(batch.step, batch.purpose, batch.has_orchestrator_part) for batch in batches[1:]] == [
        (2, BatchPurpose.TRAIN, True),
        (3, BatchPurpose.PREEMPT, False),
    ]


def test_a_resumed_run_trains_what_waited_and_dispatches_again_what_was_in_flight(tmp_path):

    async def leave_two_open(draw: Draw, base_url: str) -> list[Rollout]:
        if draw.group_id in (1, 3):
            await asyncio.Event().wait()
        return await answer_at_once(draw, base_url)

    first = run_loop(tmp_path, FRESH, max_steps=4, run_group=leave_two_open)
    layout = RunLayout(tmp_path)
    commit_with_a_trainer_part(layout, 2)
    part = read_part(layout, Step(2), rollouts_per_example=2)
    again: list[int] = []

    async def note(draw: Draw, base_url: str) -> list[Rollout]:
        again.append(draw.group_id)
        return await answer_at_once(draw, base_url)

    waiting = [group.group_id for group in part.buffer.ready]
    part.buffer.ready = part.buffer.ready[:2]  # at most one batch: for the next, groups must be dispatched
    first_taken = [group.group_id for group in part.buffer.ready]
    resumed = run_loop(tmp_path, part, max_steps=6, run_group=note, attempt=2)
    trained = {group_id for batch in first[:2] for group_id in batch.group_ids}
    later = [group_id for batch in resumed for group_id in batch.group_ids]
    assert later[: len(first_taken)] == first_taken
    assert ids_in_flight(part)[:2] == [1, 3]
    assert again[: len(part.buffer.in_flight)] == ids_in_flight(part)
    assert not trained & set(later)
    assert set(range(part.sampler.next_group_id)) == trained | set(waiting) | set(ids_in_flight(part))


def test_groups_not_started_again_yet_are_in_the_next_checkpoint_too(tmp_path):
    run_loop(tmp_path, FRESH, max_steps=2, run_group=answer_at_once)
    layout = RunLayout(tmp_path)
    commit_with_a_trainer_part(layout, 2)
    part = read_part(layout, Step(2), rollouts_per_example=2)
    sampler = ExampleSampler(EXAMPLES, seed=42, state=SamplerState(next_group_id=GroupId(100)))
    part.buffer = BufferState(in_flight=[draw for _ in range(30) if (draw := sampler.take(Step(2)))])
    part.sampler = sampler.snapshot()
    run_loop(tmp_path, part, max_steps=4, run_group=answer_at_once, attempt=2)
    commit_with_a_trainer_part(layout, 4)
    later = read_part(layout, Step(4), rollouts_per_example=2)
    events = [event for event in read_events(layout.events) if event.attempt == 2]
    cut = next(place for place, event in enumerate(events) if isinstance(event, BatchFormed) and event.step == 4)
    finished = {event.group_id for event in events[:cut] if isinstance(event, Finish)}
    assert set(ids_in_flight(later)) == set(range(100, 130)) - finished


async def fail(draw: Draw, base_url: str) -> list[Rollout]:
    raise ValueError(f"the judge is down for group {draw.group_id}")


@pytest.mark.parametrize(
    ("run_group", "rules", "said"),
    [
        (fail, None, "4 groups in a row .* the first: group 0 of toy failed: ValueError: the judge is down for group 0"),
        (
            answer_at_once,
            BufferConfig(easy_threshold=0.5),
            r"batch \d cannot be filled, [01] of 2 groups are ready: no example is left .*11 examples, 11 easy, 0 hard",
        ),
    ],
    ids=["every group fails", "every example is parked"],
)
def test_a_batch_that_cannot_be_filled_ends_the_run_with_the_reason(tmp_path, run_group, rules, said):
    with pytest.raises(ExceptionGroup) as caught:
        run_loop(tmp_path, FRESH, max_steps=20, run_group=run_group, rules=rules)
    [error] = caught.value.exceptions
    assert isinstance(error, BatchError)
    assert re.search(said, str(error))


def test_a_run_whose_examples_come_back_goes_on(tmp_path):
    rules = BufferConfig(easy_threshold=0.5, recheck_interval=1)
    batches = run_loop(tmp_path, FRESH, max_steps=8, run_group=answer_at_once, rules=rules)
    assert len(batches) == 8
    examples = [event for event in read_events(RunLayout(tmp_path).events) if isinstance(event, Dispatch)]
    assert len({event.example_id for event in examples[:11]}) == 11
