"""Where a run's processes put their temporary files, and that these go with the run."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trivet.config.layout import RunLayout
from trivet.launcher.scratch import scratch_directory, scratch_environment


@pytest.fixture
def system_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    root = tmp_path / "outputs"
    root.mkdir()
    return RunLayout(root)


def test_what_a_role_leaves_goes_with_the_run(layout: RunLayout, system_tmp: Path) -> None:
    program = "import tempfile; print(tempfile.mkdtemp())"
    with scratch_directory(layout) as directory:
        environ = scratch_environment(os.environ, directory)
        left = subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True).stdout
        assert Path(left.strip()).parent == directory
    assert list(system_tmp.iterdir()) == list(layout.root.iterdir()) == []


def test_the_next_run_removes_what_a_killed_launcher_left(layout: RunLayout, system_tmp: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from trivet.config.layout import RunLayout;"
        "from trivet.launcher.scratch import scratch_directory\n"
        "with scratch_directory(RunLayout(Path(sys.argv[1]))): os._exit(9)"
    )
    environ = {**os.environ, "TMPDIR": str(system_tmp)}
    subprocess.run([sys.executable, "-c", program, str(layout.root)], env=environ, check=False)
    (left,) = system_tmp.iterdir()
    with scratch_directory(layout) as directory:
        assert list(system_tmp.iterdir()) == [directory] != [left]


def test_a_note_that_names_something_else_removes_nothing(layout: RunLayout, system_tmp: Path) -> None:
    precious = system_tmp / "precious"
    precious.mkdir()
    (system_tmp / "trivet-run-link").symlink_to(precious)
    for noted in (precious, system_tmp / "trivet-run-link", system_tmp / "trivet-run-gone"):
        layout.scratch_note.write_text(f"{noted}\n")
        with scratch_directory(layout):
            assert precious.is_dir()
    assert precious.is_dir()


def test_compiled_code_is_found_by_the_next_run_unless_the_user_says_where(tmp_path: Path, system_tmp: Path) -> None:
    kept = scratch_environment({}, tmp_path)["TORCHINDUCTOR_CACHE_DIR"]
    assert Path(kept).parent == system_tmp
    assert scratch_environment({"TORCHINDUCTOR_CACHE_DIR": "/cache"}, tmp_path)["TORCHINDUCTOR_CACHE_DIR"] == "/cache"
