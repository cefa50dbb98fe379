import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.packages import write_installed
from trivet.cli.main import TOOLS, main
from trivet.config.reference import EXAMPLES
from trivet.dependencies import own_version


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_a_module_that_configures_and_runs(name: str) -> None:
    module = importlib.import_module(f"trivet.cli.{TOOLS[name].module}")
    assert callable(getattr(module, f"configure_{name}"))
    assert callable(getattr(module, f"run_{name}"))


def test_help_names_every_tool(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in TOOLS)


@pytest.mark.parametrize("command", ["trivet.cli.main", "trivet.launcher.commands.rl", "trivet.dialects.vf_rl"])
def test_a_command_says_its_version(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--version"])
    assert importlib.import_module(command).main() == 0
    assert capsys.readouterr().out == f"trivet {own_version()}\n"


def test_the_schemas_are_written_where_the_example_configurations_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["schema"]) == 0
    assert {path.stem for path in (tmp_path / ".schemas").iterdir()} == {command for command, _ in EXAMPLES.values()}
    assert "max_steps" in json.loads((tmp_path / ".schemas" / "rl.json").read_text())["properties"]


def test_an_unknown_tool_is_a_mistake_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["statsu", "outputs"])
    assert ended.value.code == 2
    assert "statsu" in capsys.readouterr().err


def test_a_tool_that_cannot_be_imported_for_a_wrong_version_names_it(tmp_path: Path) -> None:
    write_installed(tmp_path, "trivet", "0.1.0", requires=["pydantic>=2.12"])
    write_installed(tmp_path, "pydantic", "1.10", modules={"pydantic.py": "Field = None"})
    done = subprocess.run(
        [sys.executable, "-m", "trivet.cli.main", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "pydantic 1.10 is installed, trivet requires pydantic>=2.12" in done.stderr
    assert "Traceback" not in done.stderr
