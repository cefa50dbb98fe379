"""Real installations into virtual environments, from packages of the test's own, without an index."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.packages import write_source
from trivet.config.schema.environment import EnvConfig
from trivet.dependencies import InstalledPackages
from trivet.environments.packages.interpreters import describe_interpreter, find_interpreter
from trivet.environments.packages.venvs import EnvironmentVenv, find_venvs
from trivet.errors import ConfigError, DependencyError, EnvironmentLoadError
from trivet.tools import environment_installer
from trivet.tools.env import list_environments
from trivet.tools.environment_installer import remove
from trivet.tools.environment_source import PackageSource


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
    monkeypatch.setattr(environment_installer, "WORKER_SOURCE", worker)
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
    return environment_installer.install(source, directory=venvs, venv=venv)[0]


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
