import sys
from pathlib import Path
from typing import Any

import pytest

from trivet.config.schema.environment import EnvConfig
from trivet.config.schema.inference import ClientConfig
from trivet.environments.apis.load import traceback_tail
from trivet.environments.apis.v0.load import load_environment
from trivet.environments.settings import host_settings
from trivet.errors import EnvironmentLoadError
from trivet.wire.workers import HostSettings


def settings(env_id: str, *, name: str, args: dict[str, Any]) -> HostSettings:
    return host_settings(EnvConfig(id=env_id, name=name, args=args), model_name="m", client=ClientConfig())


def write_module(directory: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_package_without_load_environment_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "tasks_of_v1", "taskset = 1\n", monkeypatch)
    with pytest.raises(EnvironmentLoadError, match=r"has no load_environment.*v1 API"):
        load_environment(settings("tasks-of-v1", name="tasks", args={}))


def test_what_load_environment_raises_is_named_with_the_place_in_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def load_environment(path):\n    raise FileNotFoundError(path)\n"
    write_module(tmp_path, "data_is_gone", source, monkeypatch)
    with pytest.raises(EnvironmentLoadError, match="FileNotFoundError: /nowhere") as failed:
        load_environment(settings("data-is-gone", name="gone", args={"path": "/nowhere"}))
    assert "environment 'gone'" in str(failed.value)
    assert "raise FileNotFoundError(path)" in traceback_tail(failed.value, {})


def test_a_load_environment_that_leaves_the_process_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "leaves", "def load_environment():\n    raise SystemExit(5)\n", monkeypatch)
    with pytest.raises(EnvironmentLoadError, match="SystemExit: 5"):
        load_environment(settings("leaves", name="leaves", args={}))


def test_an_error_shows_neither_secrets_nor_what_a_terminal_obeys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def load_environment(api_key, pin_token):\n    raise ValueError(f'\\x1b[2J {api_key}')\n"
    write_module(tmp_path, "spills", source, monkeypatch)
    args = {"api_key": "planted", "pin_token": "q7z"}  # the second is too short to be looked for in texts
    with pytest.raises(EnvironmentLoadError, match="raised ValueError") as failed:
        load_environment(settings("spills", name="spills", args=args))
    said = f"{failed.value}{traceback_tail(failed.value, args)}"
    assert "planted" not in said
    assert "q7z" not in said
    assert said.replace("\n", "").isprintable()
    assert r"\x1b[2J" in said


def test_a_function_of_a_file_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "words.py"
    file.write_text(
        "import verifiers as vf\nfrom datasets import Dataset\n\n\ndef make(n):\n"
        "    return vf.SingleTurnEnv(dataset=Dataset.from_list([{'question': 'q', 'answer': 'a'}] * n))\n\n\n"
        "def forget(n): ...\n"
    )
    env = load_environment(settings(f"{file}:make", name="words", args={"n": 3}))
    assert len(env.build_dataset()) == 3
    with pytest.raises(EnvironmentLoadError, match=r"TypeError: it returned NoneType, not a verifiers\.Environment"):
        load_environment(settings(f"{file}:forget", name="words", args={"n": 3}))
    with pytest.raises(EnvironmentLoadError, match=r"there is no file .*gone\.py"):
        load_environment(settings(f"{tmp_path}/gone.py:make", name="gone", args={}))
