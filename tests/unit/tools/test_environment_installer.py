"""Real installations into virtual environments, from packages of the test's own, without an index."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.packages import write_source
from trivet.environments.packages.venvs import VenvStore
from trivet.errors import ConfigError, DependencyError
from trivet.tools import environment_installer
from trivet.tools.environment_installer import install, remove
from trivet.tools.environment_source import PackageSource


def build_wheel(source: Path, wheels: Path) -> None:
    program = f"import backend; backend.build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, env=os.environ | {"PYTHONPATH": "."})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VenvStore:
    if shutil.which("uv") is None:
        pytest.skip("no uv on PATH")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("0.1.14", "0.3.1", "0.4.0"):
        build_wheel(write_source(tmp_path / f"index-{version}", "verifiers", version=version), wheels)
    for version in ("1.0", "2.0"):
        build_wheel(write_source(tmp_path / f"index-{version}", "library", version=version), wheels)
    worker = write_source(tmp_path / "worker", "trivet-worker", module="")
    monkeypatch.setattr(environment_installer, "WORKER_SOURCE", worker)
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    for name, value in (("UV_FIND_LINKS", str(wheels)), ("UV_NO_INDEX", "1"), ("UV_NO_CONFIG", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return VenvStore(tmp_path / "venvs")


def env_source(folder: Path, name: str, *requires: str, version: str = "0.1.0") -> PackageSource:
    return PackageSource(words=("-e", str(write_source(folder, name, version=version, requires=requires))))


def test_environments_of_a_generation_share_and_one_that_conflicts_has_its_own(
    store: VenvStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = install(env_source(tmp_path, "first-env", "verifiers>=0.1", "library"), store=store, venv=None)
    assert (first.name, first.api, first.verifiers) == ("v0", "v0", "0.3.1")
    assert [(env.env_id, env.version) for env in first.environments] == [("first-env", "0.1.0")]
    second = install(env_source(tmp_path, "second-env", "verifiers"), store=store, venv=None)
    assert [env.env_id for env in second.environments] == ["first-env", "second-env"]
    old = install(env_source(tmp_path, "old-env", "verifiers==0.1.14"), store=store, venv=None)
    assert (old.name, old.api, old.verifiers) == ("old-env", "v0", "0.1.14")
    assert "old-env requires verifiers==0.1.14" in capsys.readouterr().out.replace("_", "-")
    pinned = install(env_source(tmp_path, "pinned-env", "verifiers", "library==1.0"), store=store, venv=None)
    assert pinned.name == "pinned-env"
    newer = install(env_source(tmp_path, "new-env", "verifiers>=0.4"), store=store, venv=None)
    assert (newer.name, newer.api, newer.verifiers) == ("v1", "v1", "0.4.0")
    assert store.records().keys() == {"v0", "old-env", "pinned-env", "v1"}
    for record in store.records().values():
        assert store.python(record).is_file()


def test_constraints_of_the_project_in_the_working_directory_do_not_hold_for_an_environment(
    store: VenvStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\n[tool.uv]\nconstraint-dependencies = ["verifiers==0.3.1"]\n'
    )
    monkeypatch.chdir(project)
    monkeypatch.delenv("UV_NO_CONFIG")
    old = install(env_source(tmp_path, "old-env", "verifiers==0.1.14"), store=store, venv=None)
    assert old.verifiers == "0.1.14"


def test_an_installation_that_fails_leaves_the_one_before(store: VenvStore, tmp_path: Path) -> None:
    source = env_source(tmp_path, "my-env", "verifiers")
    before = install(source, store=store, venv=None)
    with pytest.raises(DependencyError, match="cannot be installed into virtual environment 'v0'"):
        install(env_source(tmp_path, "other-env", "verifiers", "absent>=9"), store=store, venv="v0")
    (tmp_path / "my_env" / "backend.py").write_text("raise RuntimeError('the build fails')")
    with pytest.raises(ConfigError, match="cannot be fetched or built"):
        install(source, store=store, venv=None)
    assert store.records() == {"v0": before}
    assert store.python(before).is_file()
    assert sorted(path.name for path in (store.home / "v0").iterdir()) == ["1", "record.json"]


def test_an_update_keeps_the_one_before_for_a_run_that_uses_it_and_no_older(store: VenvStore, tmp_path: Path) -> None:
    for version in ("0.1.0", "0.2.0", "0.3.0"):
        record = install(env_source(tmp_path, "my-env", "verifiers", version=version), store=store, venv=None)
    assert [env.version for env in record.environments] == ["0.3.0"]
    assert sorted(path.name for path in (store.home / "v0").iterdir()) == ["2", "3", "record.json"]


def test_an_environment_is_removed_and_the_last_one_takes_its_virtual_environment_with_it(
    store: VenvStore, tmp_path: Path
) -> None:
    for name in ("first-env", "second-env"):
        install(env_source(tmp_path, name, "verifiers"), store=store, venv=None)
    left = remove("first-env", store=store)
    assert left is not None
    assert [env.env_id for env in left.environments] == ["second-env"]
    assert remove("second-env", store=store) is None
    assert not list(store.home.glob("v0"))
    with pytest.raises(ConfigError, match="environments there: none"):
        remove("second-env", store=store)


def test_what_is_no_environment_is_refused_before_anything_is_made(store: VenvStore, tmp_path: Path) -> None:
    source = PackageSource(words=("-e", str(write_source(tmp_path, "helpers", module="x = 1"))))
    with pytest.raises(ConfigError, match="is no environment"):
        install(source, store=store, venv=None)
    assert not store.records()
