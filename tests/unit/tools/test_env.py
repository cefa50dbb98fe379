"""Environment packages: what is written works, and what is installed is what was meant."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

from trivet.errors import ConfigError
from trivet.tools.cli import main
from trivet.tools.env import choose_source, install, write_package


def test_a_new_environment_loads_and_scores(tmp_path: Path) -> None:
    directory = write_package("my-env", folder=tmp_path)
    assert tomllib.loads((directory / "pyproject.toml").read_text())["project"]["name"] == "my-env"
    spec = importlib.util.spec_from_file_location("my_env", directory / "my_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    env = module.load_environment(num_examples=5, num_eval_examples=2)
    assert (len(env.get_dataset()), len(env.get_eval_dataset())) == (5, 2)
    answer = env.get_dataset()[0]["answer"]
    assert module.share_of_letters([{"role": "assistant", "content": answer}], answer) == 1.0
    assert module.share_of_letters([{"role": "assistant", "content": "?"}], answer) == 0.0


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


def test_a_name_means_the_folder_first_and_a_package_else(tmp_path: Path) -> None:
    directory = write_package("my-env", folder=tmp_path)
    assert choose_source("my-env", folder=tmp_path) == ("-e", str(directory))
    assert choose_source("owner/my-env", folder=tmp_path) == ("-e", str(directory))
    assert choose_source(str(directory), folder=tmp_path) == ("-e", str(directory))
    assert choose_source("another-env", folder=tmp_path) == ("another-env",)


@pytest.mark.parametrize(
    ("what", "message"), [("./nothing", "no pyproject.toml"), ("owner/unknown", "neither a directory"), ("a b", "neither")]
)
def test_what_cannot_be_installed_is_refused_with_what_there_is(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_source(what, folder=tmp_path)


def test_the_installer_is_told_which_python_and_its_exit_code_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "uv"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\nexit 7\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install(("-e", "environments/my_env")) == 7
    assert (tmp_path / "said").read_text() == f"pip install --python {sys.executable} -e environments/my_env\n"
