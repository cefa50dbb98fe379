import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

from support.packages import write_installed
from trivet.dependencies import InstalledPackages
from trivet.errors import ConfigError
from trivet.tools.cli import main
from trivet.tools.env import choose_environment, choose_source, install, list_environments, write_package


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


def test_a_wheel_is_installed_as_it_is(tmp_path: Path) -> None:
    wheel = tmp_path / "my_env-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert choose_source(str(wheel), folder=tmp_path) == (str(wheel),)


def test_the_installer_is_told_which_python_and_its_exit_code_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "uv"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\ncase "$*" in *--dry-run*) exit 0;; esac\nexit 7\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install(("-e", "environments/my_env")) == 7
    calls = [re.sub(r"--constraint \S+", "--constraint FILE", line) for line in (tmp_path / "said").read_text().splitlines()]
    command = f"pip install --python {sys.executable} --constraint FILE"
    assert calls == [f"{command} --dry-run -e environments/my_env", f"{command} -e environments/my_env"]


@pytest.mark.parametrize("requirement", ["msgspec==0.19.0", "Torch", "trivet>=0.0.1"])
def test_what_trivet_runs_on_is_not_installed_as_an_environment(requirement: str) -> None:
    with pytest.raises(ConfigError, match="is no environment: trivet itself runs on"):
        install((requirement,))


def test_the_library_of_environments_is_not_installed_as_one() -> None:
    with pytest.raises(ConfigError, match=r"verifiers\[rl\] is no environment: it comes with the environments"):
        install(("verifiers[rl]",))


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
    assert list_environments(InstalledPackages([str(site)])) == 1
    rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["NAME", "VERSION", "FROM", "LOADS"],
        ["a-env", "1.0", "editable environments/a_env", "yes"],
        ["crashes", "3.0", "index", "no: importing it ended the process with exit code 9"],
        ["fails", "4.0", "index", "no: ValueError: two lines"],
        ["stops", "5.0", "index", "no: SystemExit: 0"],
        ["tasks", "6.0", "index", "no: the module tasks has no load_environment, by which environments are loaded"],
        ["vf-b (id b-game)", "2.0", "index", "yes"],
    ]


def test_a_list_without_environments_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_environments(InstalledPackages([str(tmp_path)])) == 0
    assert "trivet env install NAME" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a-env", "A_Env", "tasks", "crashes"])
def test_an_environment_may_be_removed_whether_it_loads_or_not(site: Path, name: str) -> None:
    assert choose_environment(name, InstalledPackages([str(site)])).name == name.lower().replace("_", "-")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trivet", "trivet itself runs on it"),
        ("msgspec", "trivet itself runs on it"),
        ("verifiers", "environments are written with it"),
        ("ruff", "no module of it has load_environment"),
        ("absent", "absent is not installed; environments that are installed: a-env, crashes"),
    ],
)
def test_what_is_no_environment_is_not_removed(site: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_environment(name, InstalledPackages([str(site)]))


def test_what_another_environment_requires_is_not_removed(site: Path) -> None:
    write_installed(site, "group", "1", requires=["A_env>=1"], modules={"group.py": "load_environment = None"})
    with pytest.raises(ConfigError, match="required by group, which would no longer load; remove group first"):
        choose_environment("a-env", InstalledPackages([str(site)]))


def test_torch_of_this_installation_is_not_removed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "remove", "torch"]) == 2
    assert "torch is no environment: trivet itself runs on it, so it is not removed" in capsys.readouterr().err
