"""Run `rl` where it must refuse: exit code 2, a message with a remedy, and nothing started."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from trivet.cli.main import main
from trivet.config.layout import RunLayout
from trivet.config.schema.shared import RunIdentity
from trivet.launcher.run_directory import RunDirectory
from trivet.wire.status import RoleState, RunStatus

CONFIG = """
max_steps = 2

[model]
name = "{model}"

[orchestrator]
rollouts_per_example = 4

[[orchestrator.env]]
id = "{env}"
"""


def rl(directory: Path, *flags: str, env: str = "reverse-text") -> "subprocess.CompletedProcess[str]":
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (directory / "rl.toml").write_text(CONFIG.format(model=model, env=env))
    return subprocess.run(
        [sys.executable, "-m", "trivet.launcher.commands.rl", "@", "rl.toml", *flags],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_dry_run_starts_and_creates_nothing(tmp_path: Path) -> None:
    result = rl(tmp_path, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "max_steps = 2" in result.stdout
    assert "environment reverse-text: runs in the Python of trivet, verifiers " in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rl.toml"]


def test_a_migrated_script_of_trl_passes_a_dry_run(tmp_path: Path) -> None:
    script = "trl grpo --model_name_or_path Qwen/Qwen3-0.6B --num_generations 4 --per_device_train_batch_size 8 --max_steps 30"
    file = tmp_path / "rl.toml"
    assert main(["migrate", "--output", str(file), "--env", "reverse-text", "--", *script.split()]) == 0
    command = [sys.executable, "-m", "trivet.launcher.commands.rl", "@", "rl.toml", "--dry-run"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "max_steps = 30  # rl.toml" in result.stdout


@pytest.mark.parametrize("env", ["no-such-environment", "some-owner/no-such-environment"])
@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_an_environment_that_is_not_installed_is_refused(tmp_path: Path, flags: tuple[str, ...], env: str) -> None:
    result = rl(tmp_path, *flags, env=env)
    assert result.returncode == 2
    assert f"install it with: uv run trivet env install {env}" in result.stderr
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "outputs").exists()


BROKEN = "def load_environment():\n    raise OSError('no such data')\n"


def test_an_environment_that_cannot_be_loaded_ends_what_was_started_beside_it(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    for _ in range(2):  # what the first leaves is in nobody's way
        result = rl(tmp_path, env="broken.py:load_environment")
        assert result.returncode == 2
        assert "orchestrator failed: ended with exit code 2" in result.stdout
        assert "raised OSError: no such data" in result.stdout
    status = msgspec.json.decode(RunLayout(tmp_path / "outputs").status.read_bytes(), type=RunStatus)
    assert (status.exit_code, status.reason) == (2, "ended with exit code 2")
    assert {role.name: role.state for role in status.roles}["inference"] is RoleState.ENDED


def test_an_environment_that_cannot_be_loaded_leaves_what_clean_would_remove(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    layout = RunLayout(tmp_path / "outputs")
    with RunDirectory(layout) as directory:
        directory.begin(RunIdentity(), resumed_from=None)
    layout.weights_step(1).mkdir(parents=True)
    result = rl(tmp_path, "--clean", env="broken.py:load_environment")
    assert result.returncode == 2
    assert "raised OSError: no such data" in result.stderr
    assert layout.weights_step(1).is_dir()
    assert "started" not in result.stdout


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with RunDirectory(RunLayout(tmp_path / "outputs")):
        result = rl(tmp_path)
    assert result.returncode == 2
    assert "is in use by the run with pid" in result.stderr
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [".lock"]


def test_a_step_that_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    result = rl(tmp_path, "--trainer.ckpt.resume-step", "50")
    assert result.returncode == 2
    assert "resume_step = 50" in result.stderr
    assert not (tmp_path / "outputs" / "logs").exists()
