"""A lower bound counts as tested when it is the version that was installed."""

import pytest

from support.scripts import load_script

script = load_script("untested_bounds")


def test_bounds_are_read_and_exact_versions_are_none() -> None:
    lines = ["a>=1.2", "b==3", "c", "d[x]>=4,<5", "e>=6; python_version >= '3'"]
    assert script.lower_bounds(lines) == {"a": "1.2", "d": "4", "e": "6"}


@pytest.mark.parametrize(("installed", "is_tested"), [("24.0", True), ("24", True), ("24.0.1", False), ("23.2", False)])
def test_only_the_bound_itself_is_tested(installed: str, is_tested: bool) -> None:
    assert (script.untested_bounds({"packaging": "24"}, {"packaging": installed}) == []) is is_tested
