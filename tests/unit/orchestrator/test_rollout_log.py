from pathlib import Path

import msgspec
import numpy as np

from support.groups import make_group
from trivet.config.layout import RunLayout
from trivet.orchestrator.rollout_log import write_rollouts
from trivet.transport.recording import GROUPS_FILE, unpack_groups
from trivet.wire.rollouts import RolloutRecord
from trivet.wire.versions import Step


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
