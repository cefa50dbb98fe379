"""Servers and ranks of a run put their temporary files into one place, which goes with the run."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.launcher.plan import TRAINING, ProcessSpec
from trivet.launcher.run_directory import Scratch
from trivet.machine import compile_cache_directory

SPEC = ProcessSpec(
    name="trainer", unit=TRAINING, argv=(), log=Path("log"), env={"A": "1"}, env_defaults={"B": "2"}, does_finish=True
)


@pytest.fixture
def system_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for this test alone, whose path is as short as the system's."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that compiles
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    (tmp_path / "outputs").mkdir()
    return RunLayout(tmp_path / "outputs")


def test_what_a_role_leaves_goes_with_the_run(layout: RunLayout, system_tmp: Path) -> None:
    program = "import tempfile; print(tempfile.mkdtemp())"
    with Scratch(layout.scratch_note) as scratch:
        environ = {**os.environ, **scratch.redirect(SPEC).env}
        left = subprocess.run([sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True).stdout
        assert Path(left.strip()).parent == scratch.directory
    kept = [path for path in system_tmp.iterdir() if not path.name.startswith("torchinductor_")]
    assert kept == list(layout.root.iterdir()) == []


def test_the_next_run_removes_what_a_killed_launcher_left(layout: RunLayout, system_tmp: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from trivet.config.layout import RunLayout;"
        "from trivet.launcher.run_directory import Scratch\n"
        "with Scratch(RunLayout(Path(sys.argv[1])).scratch_note): os._exit(9)"
    )
    environ = {**os.environ, "TMPDIR": str(system_tmp)}
    subprocess.run([sys.executable, "-c", program, str(layout.root)], env=environ, check=False)
    (left,) = system_tmp.iterdir()
    with Scratch(layout.scratch_note) as scratch:
        assert list(system_tmp.iterdir()) == [scratch.directory] != [left]


def test_a_copy_of_a_live_runs_directory_leaves_that_run_its_files(layout: RunLayout, system_tmp: Path, tmp_path: Path) -> None:
    copy = RunLayout(tmp_path / "copy")
    copy.root.mkdir()
    with Scratch(layout.scratch_note) as scratch:
        copy.scratch_note.write_text(layout.scratch_note.read_text())
        with Scratch(copy.scratch_note) as other:
            assert {*system_tmp.iterdir()} == {scratch.directory, other.directory}


def test_a_note_that_names_something_else_removes_nothing(layout: RunLayout, system_tmp: Path) -> None:
    precious, link = system_tmp / "precious", system_tmp / "trivet-link"
    precious.mkdir()
    link.symlink_to(precious)
    for noted in (precious, link, system_tmp / "trivet-gone"):
        layout.scratch_note.write_text(f"{noted}\n")
        with Scratch(layout.scratch_note):
            assert precious.is_dir()
            assert link.is_symlink()


def test_the_path_leaves_room_for_the_name_of_a_socket(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Scratch(layout.scratch_note) as scratch:
        assert len(str(scratch.directory)) <= 70
    assert list(deep.iterdir()) == []
    assert not scratch.directory.exists()


def test_without_a_place_for_temporary_files_it_says_what_to_set(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(layout.root / "not there"))
    with pytest.raises(ConfigError, match="free disk space there, or set TMPDIR"), Scratch(layout.scratch_note):
        pass


def test_a_start_that_fails_leaves_nothing(layout: RunLayout, system_tmp: Path) -> None:
    layout.scratch_note.mkdir()  # so that no note can be written
    with pytest.raises(IsADirectoryError), Scratch(layout.scratch_note):
        pass
    assert list(system_tmp.iterdir()) == []


def test_what_libraries_keep_among_temporary_files_is_found_by_the_next_run(layout: RunLayout, system_tmp: Path) -> None:
    with Scratch(layout.scratch_note) as scratch:
        redirected = scratch.redirect(SPEC)
        assert redirected.env_defaults["TORCHINDUCTOR_CACHE_DIR"] == str(compile_cache_directory())
        assert Path(redirected.env_defaults["TORCHINDUCTOR_CACHE_DIR"]).parent == system_tmp
        assert redirected.env_defaults["B"] == "2"
        assert redirected.env == {"A": "1", "TMPDIR": str(scratch.directory)}
        orchestrator = replace(SPEC, name="orchestrator")
        assert scratch.redirect(orchestrator) == orchestrator, "environments keep the directory that the user has"
