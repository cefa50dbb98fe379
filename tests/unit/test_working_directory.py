"""No process of a command imports files of the working directory in place of installed packages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.process.lifetime import module_command, tied_command

SOURCE = Path(__file__).parents[2] / "src" / "trivet"
SHADOW = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\nraise SystemExit('the shadow was imported')\n"
CONFIG = """
max_steps = 2

[model]
name = "model"

[orchestrator]
batch_size = 4
rollouts_per_example = 2

[[orchestrator.env]]
id = "reverse-text"
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    for module in ("msgspec", "numpy", "pydantic", "verifiers"):
        (tmp_path / f"{module}.py").write_text(SHADOW)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rl.toml").write_text(CONFIG)
    return tmp_path


def run_in(directory: Path, command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=240, check=False)


def test_a_dry_run_of_the_console_script_imports_nothing_from_there(workplace: Path) -> None:
    script = Path(sys.executable).parent / "rl"
    ended = run_in(workplace, [str(script), "@", "rl.toml", "--dry-run"])
    assert ended.returncode == 0, ended.stderr
    assert not (workplace / "executed").exists()


def test_a_role_as_the_launcher_starts_it_imports_nothing_from_there(workplace: Path) -> None:
    ended = run_in(workplace, tied_command(module_command("trivet.orchestrator.main", "--help")))
    assert ended.returncode == 0, ended.stderr
    assert not (workplace / "executed").exists()


def test_the_shadow_works_where_nothing_keeps_it_out(workplace: Path) -> None:
    run_in(workplace, [sys.executable, "-m", "trivet.orchestrator.main", "--help"])
    assert (workplace / "executed").exists()


def test_a_module_of_the_user_is_found_by_way_of_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text("print('found')")
    monkeypatch.setenv("PYTHONPATH", ".")
    assert run_in(tmp_path, module_command("my_losses")).stdout == "found\n"


def test_one_place_says_how_a_module_is_run() -> None:
    """A module started without `module_command` searches the working directory."""
    spelled = [
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if re.search(r'"-m",\s*f?"trivet', path.read_text())
    ]
    assert spelled == []


def test_one_place_says_how_a_process_is_tied_to_its_parent() -> None:
    """Whoever starts a tied process without `tied_command` spells its arguments a second time."""
    spelled = [
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if '"trivet.process.lifetime"' in path.read_text()
    ]
    assert spelled == ["process/lifetime.py"]
