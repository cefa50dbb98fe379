from pathlib import Path

import pytest

from trivet.environments.packages.installed import require_installed
from trivet.errors import EnvironmentLoadError


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
    with pytest.raises(EnvironmentLoadError, match="did you mean 'wiki-search'"):
        require_installed("wiki-serach", environments_dir=tmp_path)
