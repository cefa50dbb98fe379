"""The version that an id asks for is compared with what is installed, before anything is started."""

from pathlib import Path

import pytest

from support.packages import write_installed
from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.packages.interpreters import find_interpreter, require_environment
from trivet.environments.settings import host_settings
from trivet.errors import EnvironmentLoadError


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_installed(tmp_path, "versioned-env", version="0.1.2", modules={"versioned_env.py": "def load_environment(): ..."})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRIVET_VENVS", str(tmp_path / "venvs"))


@pytest.mark.parametrize(
    "env_id",
    [
        *("versioned-env", "versioned_env", "versioned-env@0.1.2", "versioned_env==0.1.2", "versioned-env@0.1.2.0"),
        *("owner/versioned-env@0.1.2", "owner/versioned_env==0.1.2", "owner/versioned-env@latest"),
    ],
)
def test_an_id_with_the_installed_version_is_the_environment(env_id: str) -> None:
    env = EnvConfig(id=env_id)
    require_environment(env)
    assert not {"@", "="} & set(env.label)
    settings = host_settings(env, model_name="m", client=ClientConfig())
    assert settings.env_id.rpartition("/")[2].replace("_", "-") == "versioned-env"


@pytest.mark.parametrize("env_id", ["versioned-env@0.2", "owner/versioned_env==0.2"])
def test_another_version_is_refused_with_both_and_the_remedy(env_id: str) -> None:
    with pytest.raises(
        EnvironmentLoadError, match=r"asks for version 0\.2, and 0\.1\.2 is installed .*trivet env install"
    ) as failed:
        find_interpreter(EnvConfig(id=env_id))
    assert env_id in str(failed.value)


def test_a_version_of_what_is_not_installed_is_refused_as_not_installed() -> None:
    with pytest.raises(EnvironmentLoadError, match="is not installed"):
        find_interpreter(EnvConfig(id="absent-env@0.2"))


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("my-env@soon", "asks for version 'soon', which is none"),
        ("my-env>=0.1", "is no name of an environment; write my-env"),
        ("my-env@", "is no name of an environment"),
        ("a/b/c", "is no name of an environment"),
        ("my env", "is no name of an environment"),
    ],
)
def test_what_is_no_id_is_refused_by_the_configuration(env_id: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvConfig(id=env_id)
