"""run.json says whose run a directory holds; an attempt that another has followed commits nothing."""

from pathlib import Path

import pytest

from trivet.checkpoints.run_record import AttemptGuard, read_run, require_newest_attempt, write_run
from trivet.config.layout import RunLayout
from trivet.config.schema.shared import RunIdentity
from trivet.errors import CheckpointError

FIRST, SECOND, OTHER = RunIdentity(id="a"), RunIdentity(id="a", attempt=2), RunIdentity(id="b")
BY_HAND = RunIdentity()


@pytest.mark.parametrize(
    ("written", "asks"), [(FIRST, FIRST), (SECOND, SECOND), (FIRST, SECOND), (OTHER, BY_HAND), (None, FIRST)]
)
def test_the_newest_attempt_of_a_run_may_commit(tmp_path: Path, written: RunIdentity | None, asks: RunIdentity) -> None:
    layout = RunLayout(tmp_path)
    if written is not None:
        write_run(layout, written)
    require_newest_attempt(layout, asks)


@pytest.mark.parametrize(("written", "found"), [(SECOND, "attempt 2 of run a"), (OTHER, "attempt 1 of run b")])
def test_an_attempt_that_another_has_followed_may_not(tmp_path: Path, written: RunIdentity, found: str) -> None:
    layout = RunLayout(tmp_path)
    write_run(layout, written)
    with pytest.raises(CheckpointError, match=f"{found} has begun"):
        require_newest_attempt(layout, FIRST)


def test_a_role_that_stood_still_notices_the_attempt_that_began_meanwhile(tmp_path: Path) -> None:
    layout, now = RunLayout(tmp_path), [0.0]
    write_run(layout, FIRST)
    guard = AttemptGuard(layout, FIRST, clock=lambda: now[0])
    guard.check()
    write_run(layout, SECOND)
    guard.check()  # it has just looked
    now[0] = 20.0
    with pytest.raises(CheckpointError, match="attempt 2 of run a has begun"):
        guard.check()


def test_a_record_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert read_run(layout) is None
    layout.run_file.write_text("{")
    assert read_run(layout) is None
