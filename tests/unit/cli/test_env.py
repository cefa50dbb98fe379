import asyncio
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from support.packages import write_installed
from trivet.cli.env import list_environments, write_package
from trivet.cli.main import main
from trivet.dependencies import InstalledPackages
from trivet.errors import ConfigError


def load(directory: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_env", directory / "my_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_new_environment_loads_and_scores(tmp_path: Path) -> None:
    directory = write_package("my-env", folder=tmp_path)
    assert tomllib.loads((directory / "pyproject.toml").read_text())["project"]["name"] == "my-env"
    module = load(directory)
    env = module.load_environment(num_examples=5, num_eval_examples=2)
    assert (len(env.get_dataset()), len(env.get_eval_dataset())) == (5, 2)
    answer = env.get_dataset()[0]["answer"]
    assert module.share_of_letters([{"role": "assistant", "content": answer}], answer) == 1.0
    assert module.share_of_letters([{"role": "assistant", "content": "?"}], answer) == 0.0


def test_a_new_environment_of_the_v1_api_yields_tasks_and_scores(tmp_path: Path) -> None:
    pytest.importorskip("verifiers.v1")
    assert main(["env", "init", "my-env", "--api", "v1", "--path", str(tmp_path)]) == 0
    directory = tmp_path / "my_env"
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dependencies"]) == ("my-env", ["verifiers>=0.4,<0.5"])
    module = load(directory)
    assert module.__all__ == ["MyEnvTaskset", "OneReplyHarness"]
    first, *others = module.MyEnvTaskset(module.MyEnvConfig(id="my-env", num_tasks=5)).load()
    assert len(others) == 4
    for reply, reward in ((first.data.answer, 1.0), ("?", 0.0)):
        assert asyncio.run(first.letters(SimpleNamespace(last_reply=reply))) == reward


@pytest.mark.parametrize("name", ["My-Env", "my_env", "1env", "a--b", "../x", "class", ""])
def test_names_that_no_package_has_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="like my-env"):
        write_package(name, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory; choose another --path"):
        write_package("my-env", folder=tmp_path / "file")


def test_a_module_that_exists_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="installed already"):
        write_package("json", folder=tmp_path)


def test_an_environment_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "init", "my-env", "--path", str(tmp_path)]) == 0
    assert main(["env", "init", "my-env", "--path", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Make an installation of trivet, its dependencies, another package, and environments of every kind."""
    site = tmp_path / "site"
    write_installed(site, "trivet", "0.1.0", requires=["msgspec>=0.20"])
    write_installed(site, "msgspec", "0.21")
    write_installed(site, "verifiers", "0.3.1", modules={"verifiers/__init__.py": "def load_environment(): ..."})
    write_installed(site, "ruff", "0.12", modules={"ruff.py": "def check(): ..."})
    loader = "def load_environment(): ..."
    directory = {"url": f"file://{tmp_path}/environments/a_env", "dir_info": {"editable": True}}
    write_installed(site, "a-env", "1.0", modules={"a_env.py": f"print('hello')\n{loader}"}, direct_url=directory)
    write_installed(
        site, "vf-b", "2.0", modules={"b_game/__init__.py": "from b_game.x import load_environment", "b_game/x.py": loader}
    )
    write_installed(site, "crashes", "3.0", modules={"crashes.py": f"import os\nos._exit(9)\n{loader}"})
    write_installed(site, "fails", "4.0", modules={"fails.py": f"raise ValueError('two\\nlines')\n{loader}"})
    write_installed(site, "stops", "5.0", modules={"stops.py": f"raise SystemExit(0)\n{loader}"})
    write_installed(site, "tasks", "6.0", requires=["verifiers>=0.3"], modules={"tasks.py": "taskset = 1"})
    return site


def test_the_list_has_version_origin_and_why_one_does_not_load(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.chdir(tmp_path)
    assert list_environments(tmp_path / "venvs", InstalledPackages([str(site)])) == 1
    rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["NAME", "VERSION", "IN", "FROM", "LOADS"],
        ["a-env", "1.0", "trivet", "editable environments/a_env", "yes"],
        ["crashes", "3.0", "trivet", "index", "no: importing it ended the process with exit code 9"],
        ["fails", "4.0", "trivet", "index", "no: ValueError: two lines"],
        ["stops", "5.0", "trivet", "index", "no: SystemExit: 0"],
        ["tasks", "6.0", "trivet", "index", "no: the module tasks has no load_environment, by which environments are loaded"],
        ["vf-b (id b-game)", "2.0", "trivet", "index", "yes"],
    ]
    assert list_environments(tmp_path / "venvs", InstalledPackages([str(site)]), as_json=True) == 1
    assert [list(row.values()) for row in json.loads(capsys.readouterr().out)] == rows[1:]


def test_what_is_in_no_virtual_environment_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIVET_VENVS", str(tmp_path / "venvs"))
    assert main(["env", "remove", "torch"]) == 2
    assert "torch is in no virtual environment" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trivet", "auto", "Up", "a/b", ".."])
def test_a_name_that_no_virtual_environment_has_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "install", str(write_package("my-env", folder=tmp_path)), "--venv", name]) == 2
    assert f"--venv {name} is no name of a virtual environment" in capsys.readouterr().err
