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
