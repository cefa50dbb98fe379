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
    """A model that is sharded by name only, and records the calls of FSDP."""

    calls: list[tuple[str, bool]]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, **_: Any) -> None:
        self.calls.append(("sync", requires_gradient_sync))

    def set_reshard_after_backward(self, reshard_after_backward: bool, **_: Any) -> None:
        self.calls.append(("reshard", reshard_after_backward))


@pytest.mark.parametrize(
    ("reduces_each_row", "num_ranks", "expected"),
    [
        pytest.param(False, 2, [("sync", False), ("sync", False), ("sync", True)], id="after the last row alone"),
        pytest.param(
            *(False, 1, [(what, last) for last in (False, False, True) for what in ("sync", "reshard")]),
            id="a single rank keeps gathered parameters until then too",
        ),
        pytest.param(True, 2, [], id="FSDP reduces after each row by itself"),
    ],
)
def test_gradients_are_reduced_when_the_configuration_says_so(
    tiny_model: Path, world: World, reduces_each_row: bool, num_ranks: int, expected: list[tuple[str, bool]]
) -> None:
    model = load_policy(TrainerModelConfig(name=str(tiny_model), compute_dtype="float32"), world)
    model.__class__ = RecordingModel
    assert isinstance(model, RecordingModel)
    model.calls = []
    model.reduces_each_row = reduces_each_row
    for index in range(3):
        set_last_row(model, is_last=index == 2, world=replace(world, size=num_ranks))
    assert model.calls == expected
