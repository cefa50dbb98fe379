from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.groups import make_draw, make_examples, make_group
from trivet.algorithms.packing import PackItem, pack
from trivet.checkpoints.commit import TRAINER, begin_part, commit, finish_part
from trivet.checkpoints.orchestrator_part import read_pending_groups
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import BufferConfig, OrchestratorConfig
from trivet.errors import CheckpointError
from trivet.orchestrator.buffer import BufferState
from trivet.orchestrator.checkpoint import OrchestratorPart, RunTotals, read_part, write_part, write_rollouts
from trivet.orchestrator.sampler import ExampleSampler
from trivet.transport.recording import GROUPS_FILE, unpack_groups
from trivet.wire.codec import encode
from trivet.wire.experts import RoutedExperts
from trivet.wire.rollouts import RolloutRecord
from trivet.wire.versions import Step


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


def make_part() -> OrchestratorPart:
    rules = BufferConfig(easy_threshold=0.5)
    sampler = ExampleSampler(make_examples(toy=5), seed=1, rules=rules)
    draw = sampler.take(Step(3))
    assert draw is not None
    sampler.finished(make_group(draw.group_id, (1.0, 1.0)), draw, step=Step(3))
    buffer = BufferState(ready=[make_group(4)], in_flight=[make_draw(5, step=3)])
    return OrchestratorPart(progress=RunTotals(step=Step(3)), sampler=sampler.snapshot(), buffer=buffer, rollouts_per_example=2)


def written(layout: RunLayout, part: OrchestratorPart) -> Path:
    write_part(layout, part, config=OrchestratorConfig(rollouts_per_example=2))
    (begin_part(layout, Step(3), TRAINER) / "weights").write_text("w")
    finish_part(layout, Step(3), TRAINER)
    commit(layout, Step(3))
    return layout.checkpoint_step(3) / "orchestrator" / "state.msgpack"


def test_what_is_written_is_read_back(layout: RunLayout) -> None:
    part = make_part()
    written(layout, part)
    found = read_part(layout, Step(3), rollouts_per_example=2)
    assert (found.sampler, found.progress, found.buffer.in_flight) == (part.sampler, part.progress, part.buffer.in_flight)
    assert [parked.example_hash for parked in found.sampler.parked["toy"]]
    pending = read_pending_groups(layout, Step(3))
    assert (pending.next_group_id, pending.ready, pending.in_flight) == (1, {4}, {5})


def test_experts_and_advantages_of_tokens_that_wait_are_the_same_bytes_after_a_resume(layout: RunLayout) -> None:
    part = make_part()
    assert part.buffer.in_flight
    for number, rollout in enumerate(part.buffer.ready[0].rollouts):
        for sample in rollout.samples:
            chosen = (np.arange(6 * 3 * 2).reshape(6, 3, 2) * 5 + number) % 300
            sample.experts = RoutedExperts.compress(chosen)
            sample.advantages_T = np.linspace(-1, 1, sample.num_tokens, dtype=np.float32)
    written(layout, part)
    found = read_part(layout, Step(3), rollouts_per_example=2)
    assert found.buffer.in_flight == part.buffer.in_flight
    assert [encode(group) for group in found.buffer.ready] == [encode(group) for group in part.buffer.ready]
    rows = [
        pack([PackItem(sample=each.samples[0], advantage=0.0) for each in group.rollouts], seq_len=32)
        for group in (found.buffer.ready[0], part.buffer.ready[0])
    ]
    assert encode(rows[0]) == encode(rows[1])
    assert all(experts is not None for experts in rows[0][0].experts_S)


def test_another_group_size_is_refused_with_both_values(layout: RunLayout) -> None:
    written(layout, make_part())
    with pytest.raises(CheckpointError, match=r"rollouts_per_example was 2 .* is 4 now"):
        read_part(layout, Step(3), rollouts_per_example=4)


def test_a_part_of_another_schema_says_so(layout: RunLayout) -> None:
    path = written(layout, make_part())
    path.write_bytes(msgspec.msgpack.encode(msgspec.msgpack.decode(path.read_bytes()) | {"schema": 99}))
    with pytest.raises(CheckpointError, match="has schema 99, this version reads schema 3; resume with"):
        read_part(layout, Step(3), rollouts_per_example=2)


@pytest.mark.parametrize("damage", [b"", b"\x93not a part", encode(RunTotals())])
def test_a_damaged_part_is_refused_without_a_traceback(layout: RunLayout, damage: bytes) -> None:
    path = written(layout, make_part())
    path.write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"state\.msgpack"):
        read_part(layout, Step(3), rollouts_per_example=2)


def test_the_groups_have_a_rollout_for_each_line(tmp_path: Path):
    layout, groups = RunLayout(tmp_path), [make_group(4, rewards=[0.0, 1.0, 0.5]), make_group(7, rewards=[1.0])]
    write_rollouts(layout, Step(3), groups)
    lines = (layout.rollouts_step(3) / "rollouts.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=RolloutRecord) for line in lines]
    assert [(record.group_id, record.reward) for record in records] == [(4, 0.0), (4, 1.0), (4, 0.5), (7, 1.0)]
    recorded = unpack_groups((layout.rollouts_step(3) / GROUPS_FILE).read_bytes()).groups
    found, expected = ([rollout for group in some for rollout in group.rollouts] for some in (recorded, groups))
    for read, written in zip(found, expected, strict=True):
        np.testing.assert_array_equal(read.samples[0].token_ids_T, written.samples[0].token_ids_T)
