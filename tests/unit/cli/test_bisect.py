"""The step from which a metric stays broken."""

from pathlib import Path

import pytest

from trivet.cli.bisect import derive_limit, find_break
from trivet.cli.main import main
from trivet.errors import ConfigError


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
    assert find_break(dict(enumerate(values, start=1)), 2.0, is_upper=True) == expected
    mirrored = {step: -value for step, value in enumerate(values, start=1)}
    assert find_break(mirrored, -2.0, is_upper=False) == expected


def test_a_derived_limit_lies_between_the_ends_in_the_direction_of_the_move() -> None:
    falling = dict(enumerate([4, 4, 9, 3, 0, 0, -5], start=10))
    assert derive_limit(falling) == (2.0, False)
    assert derive_limit({step: -value for step, value in falling.items()}) == (-2.0, True)
    with pytest.raises(ConfigError, match="--above or --below is needed"):
        derive_limit(dict.fromkeys(range(8), 1.0))


def test_a_run_without_recorded_batches_says_which_key_keeps_them(tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics").mkdir()
    assert main(["bisect", str(tmp_path), "--metric", "entropy/mean"]) == 2
    assert "trainer.data.record = true" in capsys.readouterr().err
