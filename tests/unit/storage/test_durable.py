import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from trivet.storage.durable import (
    digest_of,
    explain_difference,
    hash_files,
    list_files,
    remove_directory,
    replace_file,
    sweep_removed,
    sync_tree,
    write_atomically,
    write_json_atomically,
)


def test_atomic_write_replaces_the_content_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "deep" / "value.json"
    write_json_atomically(path, {"step": 1})
    write_json_atomically(path, {"step": 2})
    assert '"step": 2' in path.read_text()
    assert [entry.name for entry in path.parent.iterdir()] == ["value.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failed_write_leaves_the_old_content(tmp_path):
    path = tmp_path / "value.json"
    write_json_atomically(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json_atomically(path, {"step": object()})
    assert '"step": 1' in path.read_text()


def test_removal_takes_the_marker_before_the_name(tmp_path, monkeypatch):
    directory = tmp_path / "step_1"
    write_atomically(directory / "MARKER", b"")
    write_atomically(directory / "data", b"x")

    def crash(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.rename", crash)
        with pytest.raises(KeyboardInterrupt):
            remove_directory(directory, marker="MARKER")
    assert list_files(directory) == ["data"]
    remove_directory(directory, marker="MARKER")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_removal_is_swept(tmp_path):
    write_atomically(tmp_path / ".step_1.77.removed" / "data", b"x")
    write_atomically(tmp_path / "step_2" / "data", b"x")
    sweep_removed(tmp_path)
    assert list_files(tmp_path) == ["step_2/data"]


def test_sync_tree_makes_private_files_readable(tmp_path):
    path = tmp_path / "sub" / "private"
    write_atomically(path, b"x")
    path.chmod(0o600)
    sync_tree(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_digest_depends_on_names_and_content_but_not_on_order(tmp_path):
    for name, content in {"a": b"1", "b": b"2", "sub/.hidden": b"3"}.items():
        write_atomically(tmp_path / name, content)
    files = hash_files(tmp_path, list_files(tmp_path))
    assert list(files) == ["a", "b", "sub/.hidden"]
    assert digest_of(files) == digest_of(dict(reversed(files.items())))
    assert digest_of(files) != digest_of({**files, "a": files["b"]})
    assert digest_of(files) != digest_of({"c" if name == "a" else name: record for name, record in files.items()})


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: path.unlink(), "is missing; 4 bytes"),
        (lambda path: path.write_bytes(b"abc"), "has 3 bytes; 4"),
        (lambda path: path.write_bytes(b"abce"), "was altered"),
    ],
)
def test_difference_names_the_file_and_what_is_wrong(tmp_path, damage, expected):
    path = tmp_path / "data"
    path.write_bytes(b"abcd")
    files = hash_files(tmp_path, ["data"])
    assert explain_difference(tmp_path, files) is None
    damage(path)
    difference = explain_difference(tmp_path, files)
    assert difference is not None
    assert str(path) in difference
    assert expected in difference


def test_writers_with_one_host_name_and_process_id_do_not_meet(tmp_path: Path) -> None:
    """Threads have both in common, as processes in containers may."""
    path, texts = tmp_path / "file", [f"{number}".encode() * 1000 for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(replace_file, path), texts))
    assert path.read_bytes() in texts
    assert list(tmp_path.iterdir()) == [path]
