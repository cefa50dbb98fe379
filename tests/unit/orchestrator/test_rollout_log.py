from pathlib import Path

import msgspec
import numpy as np

from support.groups import make_group
from trivet.config.layout import RunLayout
from trivet.orchestrator.rollout_log import RolloutRecord, discard_rollouts_after, write_rollouts
from trivet.wire.rollout_tokens import TOKENS_FILE, unpack_tokens
from trivet.wire.versions import Step


def test_the_tokens_have_an_entry_for_each_line(tmp_path: Path):
    layout, groups = RunLayout(tmp_path), [make_group(4, rewards=[0.0, 1.0, 0.5]), make_group(7, rewards=[1.0])]
    write_rollouts(layout, Step(3), groups)
    lines = (layout.rollouts_step(3) / "rollouts.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=RolloutRecord) for line in lines]
    assert [(record.group_id, record.reward) for record in records] == [(4, 0.0), (4, 1.0), (4, 0.5), (7, 1.0)]
    tokens = unpack_tokens((layout.rollouts_step(3) / TOKENS_FILE).read_bytes())
    expected = [sample.token_ids_T for group in groups for rollout in group.rollouts for sample in rollout.samples]
    for [found], token_ids_T in zip(tokens, expected, strict=True):
        np.testing.assert_array_equal(found.token_ids_T, token_ids_T)


def test_both_files_of_steps_that_happen_again_go(tmp_path: Path):
    layout = RunLayout(tmp_path)
    for step in (1, 2, 3):
        write_rollouts(layout, Step(step), [make_group(step)])
    discard_rollouts_after(layout, Step(1))
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_1"]
