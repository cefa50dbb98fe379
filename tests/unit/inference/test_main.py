import os
from pathlib import Path

from trivet.config.layout import RunLayout
from trivet.inference.main import is_foreign_run_active
from trivet.process.lock import FileLock


def test_a_server_that_the_run_did_not_start_keeps_out_of_its_reports(tmp_path: Path) -> None:
    assert not is_foreign_run_active(tmp_path, parent=1)
    with FileLock(RunLayout(tmp_path).lock, what="the run"):
        assert is_foreign_run_active(tmp_path, parent=1)
        assert not is_foreign_run_active(tmp_path, parent=os.getpid())
    assert not is_foreign_run_active(tmp_path, parent=1)
