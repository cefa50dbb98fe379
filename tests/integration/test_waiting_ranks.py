from pathlib import Path

from support.ranks import run_ranks

PROGRAM = Path(__file__).with_name("waiting_ranks_program.py")


def test_ranks_wait_for_a_batch_as_long_as_rank_0_does(tmp_path: Path) -> None:
    run_ranks(2, PROGRAM, [], logs=tmp_path)
