"""scripts/bench/orchestrator.py names functions of the orchestrator, which it replaces by functions that take the time."""

import pytest

from support.scripts import load_script

script = load_script("bench/orchestrator")


@pytest.mark.parametrize(
    ("name", "owner", "attribute"), script.PARTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_part_that_is_timed_exists(name, owner, attribute):
    assert callable(getattr(owner, attribute))
