"""The server beside others: whose reports it may write."""

from pathlib import Path

from trivet.config.inference import InferenceConfig
from trivet.config.layout import RunLayout
from trivet.config.shared import RunIdentity
from trivet.inference.server import is_beside_a_run
from trivet.lock import FileLock


def test_a_server_that_no_launcher_started_keeps_out_of_a_live_runs_reports(tmp_path: Path) -> None:
    alone = InferenceConfig(output_dir=tmp_path)
    of_the_run = InferenceConfig(output_dir=tmp_path, run=RunIdentity(id="20260101-000000-abcdef"))
    assert not is_beside_a_run(alone)
    with FileLock(RunLayout(tmp_path).lock, what="the run"):
        assert is_beside_a_run(alone)
        assert not is_beside_a_run(of_the_run)
