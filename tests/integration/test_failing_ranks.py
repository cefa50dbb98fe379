"""Two real ranks fail. Neither ends, and takes the other with it, before its write has finished."""

from pathlib import Path

from support.ranks import run_ranks
from trivet.checkpoints.parts import TRAINER, begin_part
from trivet.config.layout import RunLayout
from trivet.wire.versions import Step

PROGRAM = Path(__file__).with_name("failing_ranks_program.py")
CODE = 5


def test_ranks_that_fail_end_after_the_last_policy_and_checkpoint_have_arrived(tiny_model: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "outputs"
    begin_part(RunLayout(output_dir), Step(4), TRAINER)  # of a run that was killed
    run_ranks(2, PROGRAM, [str(tiny_model), str(output_dir), str(CODE)], logs=tmp_path, codes=[CODE, CODE])
