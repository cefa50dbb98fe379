import pytest

from trivet.config.layout import parse_step


@pytest.mark.parametrize(
    "name", ["step_٣", "step_060", "step_00", "step_", "step_-1", "step_+1", "step_1_0", "step_1 ", "step_1\n", "x"]
)
def test_a_step_is_written_in_ascii_digits_without_leading_zeros_alone(name):
    assert parse_step(name) is None
    assert (parse_step("step_0"), parse_step("step_60")) == (0, 60)
