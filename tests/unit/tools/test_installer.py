"""Make real installations into the test's own virtual environment, from its own packages, without an index."""

import ensurepip
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.packages import write_installed, write_source
from trivet.dependencies import InstalledPackages, find_project_packages
from trivet.environments.packages.discovery import find_environments
from trivet.errors import ConfigError, DependencyError
from trivet.tools.installer import (
    Conflict,
    Installer,
    choose_installer,
    describe_conflicts,
    find_conflicts,
    install_under_constraints,
    uninstall,
)


@dataclass(frozen=True)
class Target:
    """A Python with few packages: trivet, msgspec and an installer."""

    site: Path
    installer: Installer
    wheels: Path
    """The directory in which the installer finds packages by name."""

    def versions(self) -> dict[str, str]:
        return {name: package.version for name, package in InstalledPackages([str(self.site)]).find_all().items()}

    def install(self, source: Path) -> int:
        project = find_project_packages(InstalledPackages([str(self.site)]))
        return install_under_constraints(("-e", str(source)), installer=self.installer, project=project)


def _build_wheel(source: Path, wheels: Path) -> None:
    program = f"import backend; backend.build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, env=os.environ | {"PYTHONPATH": "."})


@pytest.fixture(scope="module")
def pip_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the pip that Python carries, once. `python -m venv` takes ten seconds to install it."""
    bundled = sorted(Path(ensurepip.__file__).with_name("_bundled").glob("pip-*.whl"))
    if not bundled:
        pytest.skip("this Python carries no pip")
    directory = tmp_path_factory.mktemp("pip")
    shutil.unpack_archive(bundled[-1], directory, "zip")
    return directory


@pytest.fixture(params=["uv", "pip"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    is_uv = request.param == "uv"
    if is_uv and shutil.which("uv") is None:
        pytest.skip("no uv on PATH")
    venv, wheels = tmp_path / "venv", tmp_path / "wheels"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    [site] = venv.glob("lib/python*/site-packages")
    if not is_uv:
        (site / "pip.pth").write_text(f"{request.getfixturevalue('pip_directory')}\n")
    write_installed(site, "trivet", "0.1.0", requires=["msgspec>=0.20"])
    write_installed(site, "msgspec", "0.22.0", modules={"msgspec.py": "version = 22"})
    wheels.mkdir()
    _build_wheel(write_source(tmp_path / "index", "msgspec", version="0.19.0"), wheels)
    _build_wheel(write_source(tmp_path / "index", "old-library", requires=["msgspec<0.20"]), wheels)
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, str(wheels))
    for name, value in (("UV_NO_INDEX", "1"), ("PIP_NO_INDEX", "1"), ("UV_NO_CONFIG", "1"), ("PIP_CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    if not is_uv:
        monkeypatch.setenv("PATH", str(tmp_path))
    installer = choose_installer(str(venv / "bin" / "python"))
    assert ("uv" in Path(installer.install[0]).name) is is_uv
    return Target(site=site, installer=installer, wheels=wheels)


def test_a_package_that_pins_another_version_is_refused_and_nothing_changes(target: Target, tmp_path: Path) -> None:
    before = target.versions()
    with pytest.raises(DependencyError) as refused:
        target.install(write_source(tmp_path, "pinned-env", requires=["msgspec==0.19.0"]))
    message = str(refused.value)
    assert "pinned-env requires msgspec==0.19.0, but trivet runs on msgspec 0.22.0 (trivet requires msgspec>=0.20)" in message
    assert "nothing was changed" in message
    assert "Ask the author" in message
    with pytest.raises(DependencyError, match=r"old-library requires msgspec<0\.20, but trivet runs on msgspec 0\.22\.0"):
        target.install(write_source(tmp_path, "deep-env", requires=["old-library"]))
    assert target.versions() == before
    assert (target.site / "msgspec.py").read_text() == "version = 22"


def test_an_environment_is_installed_and_removed_and_all_else_stays(target: Target, tmp_path: Path) -> None:
    before = target.versions()
    source = write_source(tmp_path, "free-env", requires=["msgspec"])
    assert target.install(source) == 0
    assert target.versions() == before | {"free-env": "0.1.0"}
    [environment] = find_environments(InstalledPackages([str(target.site), str(source)]))
    assert (environment.name, environment.origin.kind, environment.origin.location) == ("free-env", "editable", str(source))
    assert uninstall("free-env", installer=target.installer) == 0
    assert target.versions() == before
    assert source.is_dir()


def test_an_update_that_cannot_be_built_leaves_the_installed_version(
    target: Target, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_installed(target.site, "free-env", "0.1.0", modules={"free_env.py": "version = 1"})
    before = target.versions()
    source = write_source(tmp_path, "free-env", version="0.2.0")
    (source / "backend.py").write_text("raise RuntimeError('the build fails')")
    assert target.install(source) != 0
    assert re.search(r"free_env (was not|cannot be) installed", capfd.readouterr().err)
    assert target.versions() == before
    assert (target.site / "free_env.py").read_text() == "version = 1"


@pytest.mark.parametrize("target", ["uv"], indirect=True)
def test_without_constraints_the_same_package_would_replace_what_trivet_runs_on(target: Target, tmp_path: Path) -> None:
    pinned = write_source(tmp_path, "pinned-env", requires=["msgspec==0.19.0"])
    subprocess.run([*target.installer.install, "-e", str(pinned)], check=True, capture_output=True)
    assert target.versions()["msgspec"] == "0.19.0"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(
            "error: No solution found when resolving dependencies\n  cause: Because bad-env==0.1.0 depends on msgspec==0.19.0 and "
            "msgspec==0.22.0, we can conclude that bad-env==0.1.0 cannot be used.\n         And because only bad-env==0.1.0 is "
            "available and you require bad-env, we can conclude that your requirements are unsatisfiable.",
            [Conflict(package="bad-env", requirement="msgspec==0.19.0", name="msgspec")],
            id="uv",
        ),
        pytest.param(
            "No solution found:\n  ╰─▶ Because all versions of bad-env depend on\n      msgspec<0.20 and "
            "msgspec==0.22.0, we can conclude …",
            [Conflict(package="bad-env", requirement="msgspec<0.20", name="msgspec")],
            id="uv wraps, all versions",
        ),
        pytest.param(
            "ERROR: Cannot install bad-env==0.1.0 because these package versions have conflicting dependencies.\n\nThe conflict is "
            "caused by:\n    bad-env 0.1.0 depends on msgspec==0.19.0\n    The user requested (constraint) msgspec==0.22.0\n",
            [Conflict(package="bad-env", requirement="msgspec==0.19.0", name="msgspec")],
            id="pip",
        ),
        pytest.param(
            "    a 1.0 depends on Msg_Spec<0.20,>=0.19\n    b[x] 2.0 depends on torch==2.12; python_version > '3'",
            [
                Conflict(package="a", requirement="Msg_Spec<0.20,>=0.19", name="msg-spec"),
                Conflict(package="b", requirement="torch==2.12", name="torch"),
            ],
            id="pip, two packages, spelled otherwise",
        ),
        pytest.param("Because torch==2.13.0+cpu depends on msgspec>=0.20 and …", [], id="one constrained package on another"),
        pytest.param("Because bad-env==0.1.0 depends on other==1 and other==2, we …", [], id="not what trivet runs on"),
        pytest.param("error: bad-env was not found in the package registry", [], id="another failure"),
    ],
)
def test_conflicts_are_read_from_the_message_of_the_tool(message: str, expected: list[Conflict]) -> None:
    assert find_conflicts(message, frozenset({"msgspec", "msg-spec", "torch"})) == expected


def test_the_requirement_of_a_package_between_is_named_with_that_package(tmp_path: Path) -> None:
    write_installed(tmp_path, "trivet", "0.1.0", requires=["between"])
    write_installed(tmp_path, "between", "1", requires=["deep>=2"])
    write_installed(tmp_path, "deep", "2.5")
    project = find_project_packages(InstalledPackages([str(tmp_path)]))
    conflict = Conflict(package="env", requirement="deep<2", name="deep")
    message = describe_conflicts([conflict], source="env", project=project)
    assert "env requires deep<2, but trivet runs on deep 2.5 (between requires deep>=2)" in message


def _write_tool(path: Path, body: str) -> Installer:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return Installer(install=(str(path),), uninstall=(str(path),))


def test_a_conflict_in_unknown_words_is_refused_with_those_words(tmp_path: Path) -> None:
    installer = _write_tool(tmp_path / "tool", 'case "$*" in *--constraint*) echo "words of tomorrow" >&2; exit 1;; esac')
    with pytest.raises(DependencyError, match=r"needs other versions of what trivet runs on(.|\n)*words of tomorrow"):
        install_under_constraints(("env",), installer=installer, project={})


def test_another_failure_is_shown_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installer = _write_tool(tmp_path / "tool", "echo 'no such package' >&2; exit 5")
    assert install_under_constraints(("env",), installer=installer, project={}) == 5
    assert "no such package\nerror: env cannot be installed, and nothing was changed" in capsys.readouterr().err


def test_a_python_without_an_installer_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _write_tool(tmp_path / "python", "exit 1")
    with pytest.raises(ConfigError, match="neither uv on PATH nor pip"):
        choose_installer(str(tmp_path / "python"))
