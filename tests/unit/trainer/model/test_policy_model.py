"""Test when gradients are reduced over ranks. tests/integration/test_trainer_levers.py tests that numbers stay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from trivet.config.schema.model import TrainerModelConfig
from trivet.trainer.model.policy_model import PolicyModel, load_policy, set_last_row
from trivet.trainer.ranks.world import World


class RecordingModel(PolicyModel, FSDPModule):
    """A model that is sharded by name only, and records what FSDP is told."""

    told: list[tuple[str, bool]]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, **_: Any) -> None:
        self.told.append(("sync", requires_gradient_sync))

    def set_reshard_after_backward(self, reshard_after_backward: bool, **_: Any) -> None:
        self.told.append(("reshard", reshard_after_backward))


@pytest.fixture
def recording(tiny_model: Path, world: World) -> RecordingModel:
    model = load_policy(TrainerModelConfig(name=str(tiny_model), compute_dtype="float32"), world)
    model.__class__ = RecordingModel
    assert isinstance(model, RecordingModel)
    model.told = []
    return model


def tell_rows(model: RecordingModel, world: World, *, num_ranks: int) -> list[tuple[str, bool]]:
    """Return what FSDP is told over a step of three rows."""
    for index in range(3):
        set_last_row(model, is_last=index == 2, world=replace(world, size=num_ranks))
    return model.told


def test_gradients_are_reduced_after_the_last_row_alone_by_reduce_each_row_false(
    recording: RecordingModel, world: World
) -> None:
    recording.reduces_each_row = False
    assert tell_rows(recording, world, num_ranks=2) == [("sync", False), ("sync", False), ("sync", True)]


def test_a_single_rank_keeps_gathered_parameters_until_the_last_row_too(recording: RecordingModel, world: World) -> None:
    recording.reduces_each_row = False
    assert tell_rows(recording, world, num_ranks=1) == [
        (what, last) for last in (False, False, True) for what in ("sync", "reshard")
    ]


def test_fsdp_reduces_after_each_row_by_itself(recording: RecordingModel, world: World) -> None:
    recording.reduces_each_row = True
    assert tell_rows(recording, world, num_ranks=2) == []
