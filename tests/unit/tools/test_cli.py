"""The command `trivet` finds its tools."""

import importlib

import pytest

from trivet.tools.cli import TOOLS, main


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_a_module_that_configures_and_runs(name: str) -> None:
    module = importlib.import_module(TOOLS[name].module)
    assert callable(module.configure)
    assert callable(module.run)


def test_help_names_every_tool(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in TOOLS)


def test_an_unknown_tool_is_a_mistake_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["statsu", "outputs"])
    assert ended.value.code == 2
    assert "statsu" in capsys.readouterr().err
