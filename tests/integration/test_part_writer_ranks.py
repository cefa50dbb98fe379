"""Two real ranks write a checkpoint during their steps. One is slow, one has no free disk space, one is lost."""

from pathlib import Path

from support.ranks import run_ranks

PROGRAM = Path(__file__).with_name("part_writer_program.py")
ORACLE = Path(__file__).parents[1] / "unit" / "trainer" / "oracle.py"
LOST = 7
"""Exit code of the rank that is lost."""


def test_a_rank_that_is_slow_or_fails_leaves_no_wrong_checkpoint_and_nobody_waiting(tiny_model: Path, tmp_path: Path) -> None:
    run_ranks(2, PROGRAM, [str(tiny_model), str(ORACLE), str(tmp_path), str(LOST)], logs=tmp_path, codes=[0, LOST])
    assert (tmp_path / "ended").exists()
