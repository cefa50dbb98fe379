from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.groups import make_group
from trivet.config.layout import RunLayout
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.errors import BatchError, ConfigError
from trivet.orchestrator.checkpoint import write_rollouts
from trivet.transport.recording import (
    GROUPS_FILE,
    pack_groups,
    read_groups,
    recorded_files,
    require_replayable,
    unpack_groups,
)
from trivet.wire.rollouts import MaskedTokens
from trivet.wire.versions import Step


def record(root: Path, *, steps: int = 2, is_replayable: bool = True) -> RunLayout:
    layout = RunLayout(root / "recorded")
    for step in range(1, steps + 1):
        write_rollouts(layout, Step(step), [make_group(step)], run_id="first", is_replayable=is_replayable)
    return layout


def config(root: Path, **keys: object) -> OrchestratorConfig:
    values = {"output_dir": root / "new", "replay": root / "recorded", "batch_size": 2, "rollouts_per_example": 2, **keys}
    return OrchestratorConfig.model_validate(values)


def test_groups_come_back_as_they_were_with_log_probabilities_of_full_precision(tmp_path: Path) -> None:
    group = make_group(4)
    group.rollouts[0].samples[0].logprobs_T[-1] = np.float32(-1.2345678)
    layout = RunLayout(tmp_path)
    write_rollouts(layout, Step(3), [group], run_id="first", is_replayable=True)
    recorded = read_groups(layout.rollouts_step(3) / GROUPS_FILE)
    assert (recorded.run_id, recorded.step) == ("first", 3)
    [found] = recorded.groups
    assert found.rollouts[0].samples[0].logprobs_T[-1] == np.float32(-1.2345678)
    np.testing.assert_array_equal(found.rollouts[1].samples[0].token_ids_T, group.rollouts[1].samples[0].token_ids_T)


def test_without_the_key_tokens_masks_and_versions_stay_and_log_probabilities_have_three_digits() -> None:
    group = make_group(4)
    group.rollouts[0].prompt = [{"role": "user", "content": "2+2?"}]
    sample, masked = (rollout.samples[0] for rollout in group.rollouts)
    sample.logprobs_T[-4:] = np.float32([-1e-4, -0.1234567, -1.234567, -60.01])
    masked.masked = MaskedTokens(loss_mask_T=masked.loss_mask_T, logprobs_T=masked.logprobs_T)
    masked.loss_mask_T = np.zeros_like(masked.loss_mask_T)
    recorded = unpack_groups(pack_groups([group], run_id="first", step=Step(1), is_replayable=False))
    assert not recorded.is_replayable
    first, second = recorded.groups[0].rollouts
    assert first.prompt == []
    np.testing.assert_array_equal(first.samples[0].token_ids_T, sample.token_ids_T)
    np.testing.assert_array_equal(first.samples[0].loss_mask_T, sample.loss_mask_T)
    assert first.samples[0].versions == sample.versions
    # Half precision rounds to 11 significant bits: a relative error of at most 2**-11.
    np.testing.assert_allclose(first.samples[0].logprobs_T, sample.logprobs_T, rtol=2**-11)
    assert second.samples[0].masked is not None
    assert second.samples[0].masked.loss_mask_T.any()
    assert not second.samples[0].loss_mask_T.any()


def test_the_record_is_listed_in_the_order_of_its_steps(tmp_path: Path) -> None:
    layout = record(tmp_path, steps=11)
    assert [file.parent.name for file in recorded_files(layout.root)] == [f"step_{step}" for step in range(1, 12)]


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: b"\0" + data])
def test_a_damaged_file_is_refused(tmp_path: Path, damage) -> None:
    file = record(tmp_path, steps=1).rollouts_step(1) / GROUPS_FILE
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BatchError, match=r"groups\.msgpack\.z cannot be read"):
        read_groups(file)


def leave_out_a_step(layout: RunLayout) -> None:
    (layout.rollouts_step(2) / GROUPS_FILE).unlink()


@pytest.mark.parametrize(
    ("recorded", "change", "keys", "message"),
    [
        ({"is_replayable": False}, None, {}, r"was not recorded with orchestrator\.record_rollouts = true"),
        (
            {},
            leave_out_a_step,
            {},
            r"lacks the tokens and .* of 1 of 2 steps, first step_2/.*orchestrator\.record_rollouts = true",
        ),
        ({"steps": 0}, None, {}, r"orchestrator\.replay \(.*\) holds no rollouts"),
        ({}, None, {"rollouts_per_example": 1}, r"rollouts_per_example \(1\) must be that of the recorded groups .*, 2"),
        ({}, None, {"output_dir": "recorded"}, "is output_dir: a replay is a run of its own"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_key(
    tmp_path: Path,
    recorded: dict[str, Any],
    change: Callable[[RunLayout], None] | None,
    keys: dict[str, object],
    message: str,
) -> None:
    layout = record(tmp_path, **recorded)
    if change is not None:
        change(layout)
    if "output_dir" in keys:
        keys = {"output_dir": layout.root}
    with pytest.raises(ConfigError, match=message):
        require_replayable(config(tmp_path, **keys))
