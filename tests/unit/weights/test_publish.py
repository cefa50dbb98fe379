import os
import stat
import threading

import pytest

from trivet.config.layout import MANIFEST, STABLE, RunLayout
from trivet.errors import WeightsError
from trivet.storage.durable import FileRecord, digest_of, write_json_atomically
from trivet.weights.catalog import discard_policies_after, latest_version, published_versions
from trivet.weights.manifest import Manifest, make_start_manifest, read_manifest, verify
from trivet.weights.publish import publish
from trivet.weights.retention import LiveReaders, acknowledge


def write_model(content: bytes = b"weights"):
    def write(directory):
        (directory / "model.safetensors").write_bytes(content)
        (directory / "model.safetensors").chmod(0o600)
        (directory / "config.json").write_text("{}")

    return write


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path)


def test_published_directory_is_whole_and_plain(layout):
    manifest = publish(layout, version=3, run_id="run", write=write_model())
    directory = layout.weights_step(3)
    assert verify(directory) == manifest == read_manifest(directory)
    assert sorted(manifest.files) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in directory.iterdir()) == sorted([MANIFEST, STABLE, "config.json", "model.safetensors"])
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o644}
    assert [path.name for path in layout.weights.iterdir()] == ["step_3"]


def test_equal_weights_have_equal_digests_whatever_the_version(layout):
    first = publish(layout, version=1, run_id="run", write=write_model())
    second = publish(layout, version=2, run_id="run", write=write_model())
    third = publish(layout, version=3, run_id="run", write=write_model(b"others!"))
    assert first.digest == second.digest != third.digest


def test_a_crash_while_writing_leaves_nothing_a_reader_would_take(layout):
    def crash(directory):
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(layout, version=1, run_id="run", write=crash)
    assert published_versions(layout) == []
    publish(layout, version=1, run_id="run", write=write_model())
    assert (layout.weights_step(1) / "model.safetensors").read_bytes() == b"weights"


def test_every_prefix_of_the_publication_is_complete_or_absent(layout, monkeypatch):
    """Crash at each system call that changes a name. A reader finds the old version, none or the new one, never a mixture."""
    publish(layout, version=1, run_id="run", write=write_model(b"old"))
    real = {"rename": os.rename, "replace": os.replace, "unlink": os.unlink}
    publisher = threading.current_thread()
    crashes = 0
    for crash_at in range(1, 30):
        calls = 0

        def counted(name, crash_at=crash_at):
            def call(*args, **kwargs):
                nonlocal calls
                if threading.current_thread() is publisher:  # threads of other tests change names too
                    calls += 1
                    if calls == crash_at:
                        raise KeyboardInterrupt
                return real[name](*args, **kwargs)

            return call

        with monkeypatch.context() as patched:
            for name in real:
                patched.setattr(os, name, counted(name))
            try:
                publish(layout, version=1, run_id="run", write=write_model(b"new"))
                finished = True
            except KeyboardInterrupt:
                finished, crashes = False, crashes + 1
        if published_versions(layout):
            verify(layout.weights_step(1))
        if finished:
            break
    else:
        pytest.fail("publication never finished")
    assert crashes >= 4
    assert (layout.weights_step(1) / "model.safetensors").read_bytes() == b"new"


def test_a_leftover_without_marker_is_replaced(layout):
    leftover = layout.weights_step(2)
    leftover.mkdir(parents=True)
    (leftover / "stale.safetensors").write_bytes(b"stale")
    publish(layout, version=2, run_id="run", write=write_model())
    assert not (leftover / "stale.safetensors").exists()
    verify(leftover)


@pytest.mark.parametrize(
    ("write", "expected"),
    [(lambda directory: None, "is empty"), (lambda directory: (directory / "sub").mkdir(), "flat")],
)
def test_what_a_manifest_cannot_cover_is_not_published(layout, write, expected):
    with pytest.raises(WeightsError, match=expected):
        publish(layout, version=1, run_id="run", write=write)
    assert published_versions(layout) == []


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda d: (d / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (lambda d: (d / "model.safetensors").write_bytes(b"weight"), "has 6 bytes; 7"),
        (lambda d: (d / "model.safetensors").write_bytes(b"weighty"), "altered"),
        (lambda d: (d / "extra.safetensors").write_bytes(b"x"), "added after publication"),
        (lambda d: (d / STABLE).unlink(), "not published completely"),
        (lambda d: (d / MANIFEST).write_text("{"), "cannot be read"),
        (lambda d: (d / MANIFEST).unlink(), "cannot be read"),
        (lambda d: ((d / MANIFEST).unlink(), os.mkfifo(d / MANIFEST)), "cannot be read"),
        (lambda d: os.truncate(d / MANIFEST, 1 << 40), "at most 64 MiB"),
        (lambda d: ((d / "config.json").rename(d / "c"), (d / "config.json").symlink_to(d / "c")), "is a link"),
        (lambda d: ((d / "config.json").unlink(), os.mkfifo(d / "config.json")), r"config\.json is missing"),
        (
            lambda d: (d / MANIFEST).write_text((d / MANIFEST).read_text().replace('"num_bytes": 7', '"num_bytes": 8')),
            "its own digest",
        ),
    ],
)
def test_damaged_weights_are_refused(layout, damage, expected):
    publish(layout, version=1, run_id="run", write=write_model())
    damage(layout.weights_step(1))
    with pytest.raises(WeightsError, match=expected):
        verify(layout.weights_step(1))


@pytest.mark.parametrize("name", ["/etc/hostname", "../foreign", "sub/file", "..", "", "a\\b"])
def test_a_manifest_that_names_files_elsewhere_is_refused_without_a_word_about_them(layout, name):
    """The reasons must not reveal sizes and digests of files that the asker may not read."""
    publish(layout, version=1, run_id="run", write=write_model())
    (layout.weights / "foreign").write_bytes(b"something secret")
    files = {name: FileRecord(num_bytes=1, xxh3_128="0")}
    manifest = Manifest(version=1, files=files, digest=digest_of(files))
    write_json_atomically(layout.weights_step(1) / MANIFEST, manifest)
    with pytest.raises(WeightsError, match="which is no file of its directory"):
        verify(layout.weights_step(1))


def test_a_directory_under_another_versions_name_is_refused(layout):
    publish(layout, version=3, run_id="run", write=write_model())
    layout.weights_step(3).rename(layout.weights_step(4))
    with pytest.raises(WeightsError, match="is of version 3: it was copied from another directory"):
        verify(layout.weights_step(4))


def test_start_model_is_identified_by_its_weight_files_alone(layout):
    publish(layout, version=1, run_id="run", write=write_model())
    start = make_start_manifest(layout.weights_step(1))
    assert start.version == 0
    assert list(start.files) == ["model.safetensors"]


def test_catalog_lists_only_what_is_stable(layout):
    assert published_versions(layout) == []
    assert latest_version(layout) is None
    for version in (10, 2, 9):
        publish(layout, version=version, run_id="run", write=write_model())
    layout.weights_step(11).mkdir()
    (layout.weights / "step_x").mkdir()
    assert published_versions(layout) == [2, 9, 10]
    assert latest_version(layout) == 10


def test_two_processes_that_write_one_version_do_not_mix_their_files(layout, monkeypatch):
    def write_beside_another(staging):
        (staging / "first.txt").write_bytes(b"first")
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            publish(layout, version=1, run_id="run", write=write_model())

    publish(layout, version=1, run_id="run", write=write_beside_another)
    assert [path.name for path in layout.weights_step(1).glob("*.txt")] == ["first.txt"]
    assert not list(layout.weights_step(1).glob("*.safetensors"))
    verify(layout.weights_step(1))


def test_going_back_removes_newer_unfinished_and_what_readers_said_of_them(layout):
    for version in (1, 2, 3):
        publish(layout, version=version, run_id="run", write=write_model())
    (layout.weights_step(1) / STABLE).unlink()
    (layout.weights / ".step_4.tmp").mkdir()
    (layout.weights / ".step_0.99.removed").mkdir()
    acknowledge(layout, "ahead", 3)
    acknowledge(layout, "behind", 2)
    discard_policies_after(layout, 2)
    assert sorted(path.name for path in layout.weights.iterdir()) == ["readers", "step_2"]
    assert LiveReaders(layout).versions() == {"behind": 2}
    verify(layout.weights_step(2))


def test_going_back_in_an_empty_directory_does_nothing(layout):
    discard_policies_after(layout, 0)
    assert not layout.weights.exists()
