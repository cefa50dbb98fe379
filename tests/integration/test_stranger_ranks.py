"""A process that takes the place of a rank of several nodes is found before anything from it is read."""

import os
import subprocess
import sys
from pathlib import Path

from support.processes import find_free_port
from trivet.config.layout import SECRET_FILE
from trivet.launcher.plan import rank_command, rank_environment
from trivet.process.rank_place import RankPlace
from trivet.secret import make_secret

STARTED_WITHIN_S = 240.0


def test_a_rank_without_the_secret_is_refused_by_the_other(tmp_path: Path) -> None:
    place = RankPlace(first_rank=0, num_ranks=2, host="127.0.0.1", port=find_free_port(), attempt=1)
    make_secret(tmp_path / "secret")
    environment = {
        **rank_environment(2, num_cpus=2, is_on_cpu=True),
        **place.environment(),
        SECRET_FILE: str(tmp_path / "secret"),
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}",
    }
    command = rank_command(sys.executable, "stranger_rank_program", [], num_ranks=2, is_on_cpu=True)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=STARTED_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "what connected as rank 1 of 2 of the trainer does not have" in (tmp_path / "rank_0.said").read_text()
