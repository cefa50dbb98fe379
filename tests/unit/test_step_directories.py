from pathlib import Path

import pytest

from trivet.step_directories import discard_after, discard_unfinished, list_steps

OTHERS = (
    "step_٣",
    "step_02",
    "step_00",
    "step_",
    "step_-1",
    "step_+1",
    "step_1_0",
    "step_1 ",
    "step_x",
    "other",
    ".step_11.tmp",
)
"""Names of no step: those are in ASCII digits without leading zeros."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("step_10", "step_9", "step_2", *OTHERS):
        (tmp_path / name).mkdir()
    for name in ("step_10", "step_2"):
        (tmp_path / name / "WHOLE").touch()
    return tmp_path


def test_steps_are_listed_in_the_order_of_their_numbers(directory: Path) -> None:
    assert list(list_steps(directory)) == [2, 9, 10]
    assert list_steps(directory, marker="WHOLE") == {2: directory / "step_2", 10: directory / "step_10"}
    assert list_steps(directory / "missing") == {}


def test_later_steps_are_removed_and_with_a_marker_those_that_lack_it(directory: Path) -> None:
    discard_after(directory, 9)
    assert list(list_steps(directory)) == [2, 9]
    discard_after(directory, 9, marker="WHOLE")
    assert list(list_steps(directory)) == [2]
    assert {path.name for path in directory.iterdir()} == {"step_2", *OTHERS}


def test_files_are_found_and_removed_by_their_suffix(tmp_path: Path) -> None:
    for name in ("step_1.bin", "step_3.bin", "step_3.other"):
        (tmp_path / name).touch()
    assert list(list_steps(tmp_path, suffix=".bin")) == [1, 3]
    discard_after(tmp_path, 1, suffix=".bin")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1.bin", "step_3.other"]


def test_what_was_being_written_is_removed_alone(directory: Path) -> None:
    discard_unfinished(directory)
    discard_unfinished(directory / "missing")
    assert not (directory / ".step_11.tmp").exists()
    assert list(list_steps(directory)) == [2, 9, 10]
