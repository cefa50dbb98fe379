from pathlib import Path

import pytest

from trivet.environments.installed import require_installed
from trivet.errors import EnvironmentLoadError


def test_an_installed_environment_is_found_under_its_module_name() -> None:
    require_installed("owner/email")


def test_a_missing_environment_of_this_checkout_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "not_there").mkdir()
    with pytest.raises(EnvironmentLoadError, match=r"uv pip install -e .*not_there") as error:
        require_installed("not-there", environments_dir=tmp_path)
    assert error.value.exit_code == 2
