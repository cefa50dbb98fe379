"""Which release of verifiers is installed and can be run, and how an environment is installed that is not there."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.environments.apis.load import require_installed, require_release
from trivet.errors import EnvironmentLoadError


def pretend(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


@pytest.mark.parametrize(("version", "release"), [("0.3.1", (0, 3)), ("0.3.0.post2", (0, 3)), ("0.4.0rc1", (0, 4))])
def test_the_release_is_major_and_minor(version: str, release: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(version, monkeypatch)
    assert require_release("toy") == release


def test_a_missing_verifiers_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(None, monkeypatch)
    with pytest.raises(EnvironmentLoadError, match=r"'toy' needs verifiers, which is not installed.*trivet env install toy"):
        require_release("toy")


@pytest.mark.parametrize("version", ["0.1.14", "0.2.1", "0+unknown"])
def test_an_older_verifiers_is_refused_with_the_one_needed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(version, monkeypatch)
    with pytest.raises(EnvironmentLoadError) as refused:
        require_release("toy")
    assert f"verifiers {version}" in str(refused.value)
    assert "install verifiers 0.3" in str(refused.value)


def test_choosing_an_adapter_imports_nothing_that_a_worker_may_lack() -> None:
    """The worker's distribution has msgspec and numpy; everything else comes with verifiers."""
    program = (
        "import trivet.environments.apis.load, trivet.environments.apis.rewards, sys\n"
        "absent = ('pydantic', 'httpx', 'openai', 'verifiers', 'transformers', 'torch')\n"
        "sys.exit(', '.join(name for name in absent if name in sys.modules) or None)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr


def test_an_installed_environment_is_found_under_its_module_name() -> None:
    require_installed("owner/email")


def test_a_missing_environment_of_this_checkout_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "not_there").mkdir()
    with pytest.raises(EnvironmentLoadError, match="install it with: uv run trivet env install not-there") as error:
        require_installed("not-there", environments_dir=tmp_path)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("env_id", "command"),
    [
        ("someone/chess-puzzles", "uv run trivet env install someone/chess-puzzles"),
        ("chess", "uv run trivet env install chess --from-index"),
    ],
)
def test_a_missing_environment_names_the_command_that_installs_it(env_id: str, command: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLoadError, match=command):
        require_installed(env_id, environments_dir=tmp_path)


def test_a_misspelt_environment_is_answered_with_the_nearest_name_and_no_download(tmp_path: Path) -> None:
    (tmp_path / "chess_puzzles").mkdir()
    (tmp_path / "chess_puzzles" / "pyproject.toml").touch()
    with pytest.raises(EnvironmentLoadError, match="did you mean 'chess-puzzles'") as error:
        require_installed("chess-puzles", environments_dir=tmp_path)
    assert "install" not in str(error.value).replace("is not installed", "")
