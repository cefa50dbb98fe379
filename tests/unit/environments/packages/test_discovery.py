import json
from pathlib import Path

import pytest

from support.packages import write_installed
from trivet.dependencies import InstalledPackages
from trivet.environments.packages.discovery import PackageOrigin, binds_loader, check_imports, find_environments, read_origin


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def load_environment(): ...", True),
        ("async def load_environment(): ...", True),
        ("from .core import load_environment", True),
        ("from .core import load as load_environment", True),
        ("load_environment = make(1)", True),
        ("load_environment: object = None", True),
        ("try:\n    from a import load_environment\nexcept ImportError:\n    pass", True),
        ("this is no Python: load_environment", True),
        ("def load_environments(): ...", False),
        ("import verifiers as vf\nvf.load_environment('x')", False),
        ("class A:\n    def load_environment(self): ...", False),
        ("'load_environment'", False),
        ("from .core import *", False),
    ],
)
def test_a_source_names_the_loader_when_it_binds_it_at_its_top_level(source: str, expected: bool) -> None:
    assert binds_loader(source) is expected


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, PackageOrigin(kind="index")),
        ({"url": "file:///e/a%20b", "dir_info": {"editable": True}}, PackageOrigin(kind="editable", location="/e/a b")),
        ({"url": "file:///e/a", "dir_info": {}}, PackageOrigin(kind="directory", location="/e/a")),
        (
            {"url": "file:///e/a-1-py3-none-any.whl", "archive_info": {}},
            PackageOrigin(kind="wheel", location="/e/a-1-py3-none-any.whl"),
        ),
        (
            {"url": "https://u:secret@h.example/a.zip", "archive_info": {}},
            PackageOrigin(kind="archive", location="https://h.example/a.zip"),
        ),
        (
            {"url": "https://h.example/a", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}},
            PackageOrigin(kind="git", location="https://h.example/a@0123456789ab"),
        ),
    ],
)
def test_the_origin_is_what_the_installer_recorded(direct_url: dict[str, object] | None, expected: PackageOrigin) -> None:
    assert read_origin(json.dumps(direct_url) if direct_url else None) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (PackageOrigin(kind="index"), "index"),
        (PackageOrigin(kind="editable", location="/here/a"), "editable a"),
        (PackageOrigin(kind="editable", location="/else/a"), "editable /else/a"),
        (PackageOrigin(kind="git", location="https://h.example/a@01"), "git https://h.example/a@01"),
    ],
)
def test_a_location_is_relative_below_the_current_directory(origin: PackageOrigin, expected: str) -> None:
    assert origin.describe(base=Path("/here")) == expected


def test_the_modules_of_a_package_come_from_its_files(tmp_path: Path) -> None:
    loader = {"game_of_words/__init__.py": "def load_environment(): ...", "game_of_words/rest.py": ""}
    write_installed(tmp_path, "vf-words", "1", modules=loader)
    write_installed(
        tmp_path, "helpers", "1", modules={"helpers/__init__.py": "", "helpers/env.py": "def load_environment(): ..."}
    )
    assert [(each.name, each.module) for each in find_environments(InstalledPackages([str(tmp_path)]))] == [
        ("vf-words", "game_of_words")
    ]


def test_a_module_that_hangs_or_ends_the_process_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("def load_environment(): ...")
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)")
    (tmp_path / "two.py").write_text("print('an answer?')\nload_environment = print")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    problems = check_imports(["one", "killed", "two", "hangs", "two"], timeout_s=3)
    assert problems == {
        "one": "",
        "killed": "importing it ended the process with exit code -9",
        "two": "",
        "hangs": "importing it took more than 3 s",
    }


def test_a_release_of_the_v1_api_needs_an_exported_taskset_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = "class Taskset: ...\nclass Env: ..."
    write_installed(tmp_path, "verifiers", "0.4.0", modules={"verifiers/__init__.py": "", "verifiers/v1.py": library})
    header = "import verifiers.v1 as vf\n"
    (tmp_path / "tasks.py").write_text(f"{header}class Mine(vf.Taskset): ...\n__all__ = ['Mine']")
    (tmp_path / "plays.py").write_text(f"{header}class Mine(vf.Env): ...\n__all__ = ['Mine']")
    (tmp_path / "hides.py").write_text(f"{header}class Mine(vf.Taskset): ...")
    (tmp_path / "passes_on.py").write_text(f"{header}Taskset = vf.Taskset\n__all__ = ['Taskset', 'missing']")
    (tmp_path / "older.py").write_text("def load_environment(): ...")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    problems = check_imports(["tasks", "plays", "hides", "passes_on", "older"])
    exports = "exports no Taskset or Env through __all__, by which environments of the v1 API are loaded"
    assert problems == {
        "tasks": "",
        "plays": "",
        "hides": f"the module hides {exports}",
        "passes_on": f"the module passes_on {exports}",
        "older": "the module older has load_environment, which is of the v0 API; verifiers here has the v1 API: require "
        "verifiers<0.4",
    }
