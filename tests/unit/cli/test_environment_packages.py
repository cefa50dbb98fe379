"""Which package a word means, what it needs, and real installations of packages of the test's own, without an index."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from support.http_fake import serve
from support.packages import write_installed, write_source
from support.processes import find_free_port
from trivet.cli import environment_packages
from trivet.cli.env import list_environments
from trivet.cli.environment_packages import (
    PackageSource,
    choose_source,
    detect_api,
    explain_conflicts,
    inspect,
    remove,
    require_on_hub,
    run_installer,
)
from trivet.cli.main import main
from trivet.config.schema.environment import EnvConfig
from trivet.dependencies import InstalledPackages
from trivet.environments.packages.interpreters import EnvironmentVenv, describe_interpreter, find_interpreter, find_venvs
from trivet.errors import ConfigError, DependencyError, EnvironmentLoadError


def test_a_name_means_the_folder_first(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "my-env")
    for word in ("my-env", "owner/my-env", str(directory)):
        source = choose_source(word, folder=tmp_path, is_index_allowed=False)
        assert source == PackageSource(words=("-e", str(directory)))


def test_the_owner_of_a_package_of_the_hub_is_kept_and_what_would_be_fetched_is_said(tmp_path: Path) -> None:
    source = choose_source("some-owner/chess==0.2", folder=tmp_path, is_index_allowed=False)
    assert source.describe() == "chess==0.2 from https://hub.primeintellect.ai/some-owner/simple/"
    assert source.index_words == ("--extra-index-url", "https://hub.primeintellect.ai/some-owner/simple/")


@pytest.mark.parametrize("word", ["my-env@0.1.0", "my_env==0.1.0", "owner/my-env@0.1.0"])
def test_a_name_with_a_version_means_the_same_folder(tmp_path: Path, word: str) -> None:
    directory = write_source(tmp_path, "my-env")
    source = choose_source(word, folder=tmp_path, is_index_allowed=False)
    assert source == PackageSource(words=("-e", str(directory)), version=Version("0.1.0"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("owner/chess@0.2", "chess==0.2 from https://hub.primeintellect.ai/owner/simple/"),
        ("owner/chess@latest", "chess from https://hub.primeintellect.ai/owner/simple/"),
        ("chess@0.2", "chess==0.2"),
    ],
)
def test_a_version_is_asked_for_in_the_words_of_an_installer(tmp_path: Path, word: str, expected: str) -> None:
    assert choose_source(word, folder=tmp_path, is_index_allowed=True).describe() == expected


def test_a_folder_of_another_version_is_not_installed(tmp_path: Path) -> None:
    write_source(tmp_path, "my-env", version="0.1.0")
    source = choose_source("my-env@0.2.0", folder=tmp_path, is_index_allowed=False)
    with pytest.raises(ConfigError, match=r"is version 0\.1\.0 and not 0\.2\.0"):
        inspect(source)


def test_an_unknown_name_is_downloaded_only_when_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'chess' is none of .* add --from-index"):
        choose_source("chess", folder=tmp_path, is_index_allowed=False)
    assert choose_source("chess>=1,<2", folder=tmp_path, is_index_allowed=True).words == ("chess>=1,<2",)


@pytest.mark.parametrize(
    ("what", "message"), [("./nothing", "no pyproject.toml"), ("a b", "neither a directory"), ("a/b/c", "neither")]
)
def test_what_cannot_be_installed_is_refused(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_source(what, folder=tmp_path, is_index_allowed=True)


def test_a_wheel_is_installed_as_it_is(tmp_path: Path) -> None:
    wheel = tmp_path / "my_env-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert choose_source(str(wheel), folder=tmp_path, is_index_allowed=False).words == (str(wheel),)


@pytest.mark.parametrize(
    ("requirement", "text", "expected"),
    [
        ("verifiers>=0.4", "", "v1"),
        ("verifiers==0.4.1", "", "v1"),
        ("verifiers>=0.4.0.dev3", "", "v1"),
        ("verifiers==0.1.14", "", "v0"),
        ("verifiers>=0.1,<0.4", "import verifiers.v1 as v1", "v0"),
        ("verifiers", "import verifiers as vf", "v0"),
        ("verifiers", "import verifiers.v1 as vf", "v1"),
        ("verifiers>=0.3", "x = 1\nfrom verifiers.v1 import Taskset", "v1"),
        ("verifiers>=0.3", "from verifiers import Rubric, v1", "v1"),
        ("other>=0.4", "", "v0"),
    ],
)
def test_the_generation_comes_from_the_requirement_and_then_from_the_imports(
    tmp_path: Path, requirement: str, text: str, expected: str
) -> None:
    write_installed(tmp_path, "env", "1", requires=[requirement])
    package = InstalledPackages([str(tmp_path)]).find("env")
    assert package is not None
    assert detect_api(package, ["", text]) == expected


def test_a_hub_that_cannot_be_reached_is_one_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = f"http://127.0.0.1:{find_free_port()}"
    monkeypatch.setattr(environment_packages, "HUB", hub)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TRIVET_VENVS", str(tmp_path / "venvs"))
    assert main(["env", "install", "some-owner/chess", "--path", str(tmp_path)]) == 2
    said = capsys.readouterr()
    [error] = said.err.splitlines()
    assert error.startswith(f"error: the environments hub cannot be reached at {hub}/some-owner/simple/ (")
    assert error.endswith("or install from a directory or a wheel: uv run trivet env install PATH")
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_only_a_package_that_its_owner_has_on_the_hub_reaches_an_installer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    asked: list[str] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(path)
        return (200, b"[]") if path.endswith("/some-owner/simple/chess-puzzles/") else (404, b"[]")

    with serve(answer) as url:
        index = f"{url}/some-owner/simple/"
        require_on_hub(PackageSource(words=("Chess_Puzzles==0.2",), index=index))
        with pytest.raises(ConfigError, match="has no package 'go', and nothing was changed; check owner and name"):
            require_on_hub(PackageSource(words=("go",), index=index))
    assert [path.partition("/some-owner/")[2] for path in asked] == ["simple/chess-puzzles/", "simple/go/"]


def test_a_package_of_no_hub_is_looked_for_nowhere() -> None:
    require_on_hub(PackageSource(words=("-e", "/environments/mine")))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(
            "error: No solution found when resolving dependencies\n  cause: Because bad-env==0.1.0 depends on "
            "verifiers==0.1.14 and verifiers>=0.3,<0.4, we can conclude that bad-env==0.1.0 cannot be used.",
            "bad-env requires verifiers==0.1.14, and it holds verifiers>=0.3,<0.4",
            id="uv",
        ),
        pytest.param(
            "No solution found:\n  ╰─▶ Because all versions of bad-env depend on\n      verifiers<0.2 and …, we can conclude …",
            "bad-env requires verifiers<0.2, and it holds verifiers>=0.3,<0.4",
            id="uv wraps, all versions",
        ),
        pytest.param(
            "caused by:\n    bad-env[x] 0.1.0 depends on Verifiers==0.2; python_version > '3'\n    The user requested (constraint)",
            "bad-env requires Verifiers==0.2, and it holds verifiers>=0.3,<0.4",
            id="pip, spelled otherwise",
        ),
        pytest.param("Because env==1.0 depends on verifiers==0.3.1 and msgspec==0.19.0, we …", "", id="a pin that agrees"),
        pytest.param("Because bad-env==0.1.0 depends on other==1 and other==2, we …", "", id="another package"),
        pytest.param("error: bad-env was not found in the package registry", "", id="another failure"),
    ],
)
def test_conflicts_are_read_from_the_message_of_the_tool(message: str, expected: str) -> None:
    assert explain_conflicts(message, "verifiers>=0.3,<0.4") == expected


def test_a_python_without_an_installer_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="neither uv on PATH nor pip"):
        run_installer([], python=str(python))


def build_wheel(source: Path, wheels: Path) -> None:
    program = f"import backend; backend.build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, env=os.environ | {"PYTHONPATH": "."})


@pytest.fixture
def venvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("uv") is None:
        pytest.skip("no uv on PATH")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("0.1.14", "0.3.1", "0.4.0"):
        build_wheel(write_source(tmp_path / f"index-{version}", "verifiers", version=version), wheels)
    for version in ("1.0", "2.0"):
        build_wheel(write_source(tmp_path / f"index-{version}", "trivet-test-library", version=version), wheels)
    worker = write_source(tmp_path / "worker", "trivet-worker", module="")
    monkeypatch.setattr(environment_packages, "WORKER_SOURCE", worker)
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    for name, value in (("UV_FIND_LINKS", str(wheels)), ("UV_NO_INDEX", "1"), ("UV_NO_CONFIG", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRIVET_VENVS", str(tmp_path / "venvs"))
    return tmp_path / "venvs"


def env_source(folder: Path, name: str, *requires: str, version: str = "0.1.0") -> PackageSource:
    return PackageSource(words=("-e", str(write_source(folder, name, version=version, requires=requires))))


def install(source: PackageSource, venvs: Path, venv: str | None = None) -> EnvironmentVenv:
    return environment_packages.install(source, directory=venvs, venv=venv)[0]


def test_each_environment_has_a_virtual_environment_with_what_it_requires(venvs: Path, tmp_path: Path) -> None:
    loose = install(env_source(tmp_path, "loose-env", "verifiers>=0.1", "trivet-test-library"), venvs)
    assert (loose.name, loose.version_of("verifiers"), loose.version_of("trivet-test-library")) == ("loose-env", "0.3.1", "2.0")
    assert loose.version_of("loose-env") == "0.1.0"
    pinned = install(env_source(tmp_path, "pinned-env", "verifiers", "trivet-test-library==1.0"), venvs, venv="elsewhere")
    assert (pinned.name, pinned.version_of("trivet-test-library")) == ("elsewhere", "1.0")
    newer = install(env_source(tmp_path, "new-env", "verifiers>=0.4"), venvs)
    assert (newer.name, newer.version_of("verifiers")) == ("new-env", "0.4.0")
    assert [venv.name for venv in find_venvs(venvs)] == ["elsewhere", "loose-env", "new-env"]
    for venv, env_id in ((loose, "loose_env"), (pinned, "owner/pinned-env"), (newer, "new-env@0.1.0")):
        assert find_interpreter(EnvConfig(id=env_id)) == str(venv.python)
        assert venv.python.is_file()
    assert re.fullmatch(
        r"virtual environment loose-env \(Python 3\.\d+\.\d+, verifiers 0\.3\.1\)",
        describe_interpreter(EnvConfig(id="loose-env")),
    )
    install(env_source(tmp_path, "pinned-env", "verifiers"), venvs)
    install(env_source(tmp_path, "pinned-env", "verifiers"), venvs, venv="third")
    assert find_interpreter(EnvConfig(id="pinned-env")) == str(venvs / "pinned-env" / "bin" / "python")
    remove("pinned-env", directory=venvs)
    with pytest.raises(EnvironmentLoadError, match="is in elsewhere and third: name one with"):
        find_interpreter(EnvConfig(id="pinned-env"))


def test_a_release_that_cannot_be_run_is_refused(venvs: Path, tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match=r"verifiers==0\.1\.14, and it holds verifiers>=0\.3,<0\.4"):
        install(env_source(tmp_path, "old-env", "verifiers==0.1.14"), venvs)
    assert not find_venvs(venvs)


def test_constraints_of_the_project_in_the_working_directory_do_not_hold_for_an_environment(
    venvs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "project"\nversion = "1"\n[tool.uv]\nconstraint-dependencies = ["trivet-test-library==2.0"]\n'
    )
    monkeypatch.chdir(project)
    monkeypatch.delenv("UV_NO_CONFIG")
    assert (
        install(env_source(tmp_path, "my-env", "verifiers", "trivet-test-library==1.0"), venvs).version_of(
            "trivet-test-library"
        )
        == "1.0"
    )


def test_an_installation_that_fails_leaves_the_one_before(venvs: Path, tmp_path: Path) -> None:
    source = env_source(tmp_path, "my-env", "verifiers")
    before = install(source, venvs)
    with pytest.raises(DependencyError, match="cannot be installed"):
        install(env_source(tmp_path, "my-env", "verifiers", "absent>=9"), venvs)
    with pytest.raises(ConfigError, match="'my-env' has another environment"):
        install(env_source(tmp_path, "other-env", "verifiers"), venvs, venv="my-env")
    (tmp_path / "my_env" / "backend.py").write_text("raise RuntimeError('the build fails')")
    with pytest.raises(ConfigError, match="cannot be fetched or built"):
        install(source, venvs)
    assert find_venvs(venvs) == [before]
    assert before.version_of("my-env") == "0.1.0"
    assert sorted(path.name for path in venvs.iterdir()) == [".lock", "my-env"]


def test_an_update_replaces_the_one_before(venvs: Path, tmp_path: Path) -> None:
    for version in ("0.1.0", "0.2.0"):
        made = install(env_source(tmp_path, "my-env", "verifiers", version=version), venvs)
        assert made.version_of("my-env") == version
        done = subprocess.run([made.python, "-c", "import my_env"], check=False)
        assert done.returncode == 0
    assert sorted(path.name for path in venvs.iterdir()) == [".lock", "my-env"]


def test_an_environment_is_removed_with_its_virtual_environment(venvs: Path, tmp_path: Path) -> None:
    for name, venv in (("first-env", None), ("second-env", "elsewhere")):
        install(env_source(tmp_path, name, "verifiers"), venvs, venv=venv)
    remove("first-env", directory=venvs)
    assert [venv.name for venv in find_venvs(venvs)] == ["elsewhere"]
    remove("second-env", directory=venvs)
    with pytest.raises(ConfigError, match="virtual environments there: none"):
        remove("second-env", directory=venvs)


def test_the_list_has_an_editable_environment_whose_module_has_another_name(
    venvs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = env_source(tmp_path, "vf-game", "verifiers")
    directory = tmp_path / "vf_game"
    (directory / "vf_game.py").rename(directory / "game.py")
    assert install(source, venvs).name == "game"
    list_environments(venvs, InstalledPackages([]))
    assert "vf-game (id game)  0.1.0    game (verifiers 0.3.1)  editable" in capsys.readouterr().out


def test_what_is_no_environment_is_refused_before_anything_is_made(venvs: Path, tmp_path: Path) -> None:
    source = PackageSource(words=("-e", str(write_source(tmp_path, "helpers", module="x = 1"))))
    with pytest.raises(ConfigError, match="is no environment"):
        install(source, venvs)
    assert not find_venvs(venvs)
