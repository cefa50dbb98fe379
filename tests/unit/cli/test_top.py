from pathlib import Path

import numpy as np
import pytest

from support.big_run import write_run
from trivet.cli.main import main
from trivet.cli.run_tools import sparkline
from trivet.config.layout import RunLayout

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return write_run(tmp_path_factory.mktemp("runs") / "run", num_steps=40, is_running=True)


def test_one_picture_says_who_waits_and_the_newest_numbers(layout: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["top", str(layout.root), "--once"]) == 0
    text = capsys.readouterr().out
    assert "has waited 3 s for batch 41 (from orchestrator)" in text
    assert "40/80 steps" in text
    assert "6 in flight" in text
    for label in ("reward", "loss", "entropy", "mismatch KL", "staleness", "tokens/s", "step time, s"):
        assert label in text


def test_a_run_without_steps_says_what_is_awaited(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    assert main(["top", str(tmp_path), "--once"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no step has ended yet" in text


def test_codes_in_an_error_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    layout = write_run(tmp_path / "run", num_steps=2, is_running=True)
    hostile = rb'"last_error":"bad \u001b[2J\u0007[red]end"'
    layout.status.write_bytes(layout.status.read_bytes().replace(b'"last_error":""', hostile))
    assert main(["top", str(layout.root), "--once"]) == 0
    text = capsys.readouterr().out
    assert "[red]end" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_directory_that_holds_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["top", str(tmp_path)]) == 2
    assert "give a run's output_dir" in capsys.readouterr().err


def test_bars_go_from_the_least_to_the_greatest_in_the_room_there_is():
    assert sparkline(np.array([0.0, 1.0]), width=10) == "▁█"
    assert sparkline(np.array([2.0, np.nan, 2.0]), width=10) == "▁▁"
    assert sparkline(np.arange(1000.0), width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([]), width=8) == ""
