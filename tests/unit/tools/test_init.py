"""A workspace: everything in it works, and nothing is written over."""

import ast
from pathlib import Path

import pytest

from trivet.config.load import load_config
from trivet.config.rl import RLConfig
from trivet.config.vf_rl import VfRLConfig
from trivet.config.vf_translation import load_run
from trivet.tools.cli import main
from trivet.tools.init import ENVIRONMENTS, write_workspace


def test_a_workspace_has_every_environment_in_both_dialects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = tmp_path / "lab"
    assert main(["init", str(workspace)]) == 0
    assert "uv run vf-rl @ configs/vf-rl/reverse-text.toml" in capsys.readouterr().out
    for name in ENVIRONMENTS:
        own = load_config(RLConfig, ["@", str(workspace / f"configs/rl/{name}.toml")], environ={}).config
        dialect = load_config(VfRLConfig, ["@", str(workspace / f"configs/vf-rl/{name}.toml")], environ={})
        assert [env.id for env in own.orchestrator.env] == [
            env.id for env in load_run(dialect, environ={}).config.orchestrator.env
        ]
    ast.parse((workspace / "configs/endpoints.py").read_text())
    assert (workspace / "environments/AGENTS.md").exists()
    assert (workspace / "README.md").exists()


def test_files_in_the_way_are_named_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "README.md" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_directory_with_other_files_may_become_a_workspace(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write_workspace(tmp_path)
    assert (tmp_path / "configs/vf-rl/wordle.toml").exists()
