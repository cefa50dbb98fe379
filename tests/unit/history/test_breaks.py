"""The step from which a metric stays broken."""

from pathlib import Path

import numpy as np
import pytest

from trivet.cli.main import main
from trivet.errors import ConfigError
from trivet.history.breaks import Threshold, derive_threshold, find_break


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 1, 5, 1, 1, 1], None),  # one value alone may be chance
        ([1, 1, 5, 5, 5, 1], 3),
        ([1, 1, 1, 1, 5, 5], 5),  # the last values are all that follow
        ([1, 1, float("nan"), 5, 5, 5], 3),
        ([5, 5, 5, 1, 1, 1], 1),
        ([1, 1, 1], None),
    ],
)
def test_a_break_is_the_first_of_three_broken_values(values: list[float], expected: int | None) -> None:
    threshold = Threshold(value=2.0, is_upper=True)
    assert find_break(dict(enumerate(values, start=1)), threshold) == expected
    mirrored = {step: -value for step, value in enumerate(values, start=1)}
    assert find_break(mirrored, Threshold(value=-2.0, is_upper=False)) == expected


def test_a_derived_threshold_lies_between_the_ends_in_the_direction_of_the_move() -> None:
    falling = dict(enumerate([4, 4, 9, 3, 0, 0, -5], start=10))
    assert derive_threshold(falling) == Threshold(value=2.0, is_upper=False)
    assert derive_threshold({step: -value for step, value in falling.items()}) == Threshold(value=-2.0, is_upper=True)


@pytest.mark.parametrize("values", [[1.0] * 8, [1.0, 2.0, 3.0], [np.nan] * 8])
def test_a_threshold_that_cannot_be_derived_is_asked_for(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="--above or --below is needed"):
        derive_threshold(dict(enumerate(values)))


def test_a_run_without_recorded_batches_says_which_key_keeps_them(tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics").mkdir()
    assert main(["bisect", str(tmp_path), "--metric", "entropy/mean"]) == 2
    assert "trainer.data.record = true" in capsys.readouterr().err
