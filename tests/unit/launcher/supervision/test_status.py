"""status.json: whole or not at all, and never the reason that a run ends."""

import sys
from pathlib import Path

import msgspec
import pytest

from trivet.config.layout import RunLayout
from trivet.launcher.logs import RunLog
from trivet.launcher.supervision.status import StatusFile
from trivet.wire.status import RunState, RunStatus

STATUS = RunStatus(run_id="r", attempt=1, pid=1, state=RunState.RUNNING, started=0.0, time=1.0)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    with (tmp_path / "rl.log").open("a") as file:
        StatusFile(RunLayout(tmp_path), log=RunLog(sys.stdout, file)).write(STATUS)
    assert msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=RunStatus) == STATUS


def test_a_status_that_cannot_be_written_is_said_once_until_it_can_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "outputs"
    blocked.write_text("a file, where the directory should be")
    with (tmp_path / "rl.log").open("a") as file:
        status = StatusFile(RunLayout(blocked), log=RunLog(sys.stdout, file))
        status.write(STATUS)
        status.write(STATUS)
        blocked.unlink()
        status.write(STATUS)
    assert capsys.readouterr().out.count("cannot be written") == 1
    assert (blocked / "status.json").exists()
