"""A node with a directory of its own gets the files that it reads, and its logs reach the first node, whatever is lost between."""

import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from support.fake_roles import make_facts, make_spec
from support.processes import wait_until
from trivet.cluster import own_directory
from trivet.cluster.messages import Desired, LogPart, Observed, decode, encode
from trivet.cluster.own_directory import OwnDirectory, copy_logs, copying_logs, scratch_note_of
from trivet.cluster.table import NodeTable
from trivet.config.layout import RunLayout
from trivet.launcher.plan import report_files
from trivet.secret import read_secret

OUTPUT_DIR = Path("outputs")
TOKEN = "ab" * 32
NODE = 1


class Cluster:
    """The logs of the first node, the driver's table, and a node with a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.first = RunLayout(directory / "first")
        self.num_observed = 0
        self.begin_driver()
        self.begin_actor()

    def begin_driver(self) -> None:
        self.table = NodeTable({NODE: ()}, lost_after_s=30.0)

    def begin_actor(self) -> None:
        """Begin an actor of the node: its directory is new."""
        self.own = OwnDirectory(Path(tempfile.mkdtemp(dir=self.directory)) / "run", output_dir=OUTPUT_DIR)
        self.table.begin_session(NODE)

    def write(self, data: bytes, name: str = "inference.stdout") -> None:
        path = self.own.layout.log_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def send(self) -> Observed:
        """Have the node observe and the driver receive it."""
        self.num_observed += 1
        desired = self.table.next_message(NODE)
        assert desired is not None
        self.own.acknowledge(decode(encode(desired), Desired).copied)
        observed = Observed(
            session=desired.session, observed_at=self.num_observed, time=0, facts=make_facts(), logs=self.own.read_logs()
        )
        message = encode(observed)
        assert len(message) < 100 << 10, "Ray would put it into its object store"
        self.receive(decode(message, Observed))
        return observed

    def receive(self, observed: Observed) -> None:
        self.table.receive(NODE, observed, now=0.0, unix_time=0.0)

    def exchange(self) -> Mapping[str, LogPart]:
        """Have the node's logs copied; return the parts that it sent."""
        observed = self.send()
        copy_logs(self.table, self.first.logs)
        return observed.logs

    def read(self, name: str = "inference.stdout") -> bytes:
        path = self.first.log_file(name)
        return path.read_bytes() if path.exists() else b""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_lines_follow_even_when_one_is_cut_in_the_middle(cluster: Cluster) -> None:
    for data, expected in ((b"one\ntw", b"one\ntw"), (b"", b"one\ntw"), (b"o\n", b"one\ntwo\n"), (b"\xff", b"one\ntwo\n\xff")):
        cluster.write(data)
        cluster.exchange()
        assert cluster.read() == expected
    assert cluster.exchange() == {}


def test_what_is_lost_or_arrives_twice_or_late_changes_nothing(cluster: Cluster) -> None:
    cluster.write(b"first\n")
    early = cluster.send()  # the driver's answer is lost: the node does not know that it arrived
    again = cluster.send()
    assert again.logs == early.logs
    copy_logs(cluster.table, cluster.first.logs)
    copy_logs(cluster.table, cluster.first.logs)
    cluster.receive(again)
    copy_logs(cluster.table, cluster.first.logs)
    cluster.write(b"second\n")
    cluster.exchange()
    cluster.receive(early)
    copy_logs(cluster.table, cluster.first.logs)
    cluster.exchange()
    assert cluster.read() == b"first\nsecond\n"


def test_a_large_log_passes_in_small_parts_beside_a_small_one(cluster: Cluster) -> None:
    block, num_blocks = os.urandom(1 << 20), 100
    for _ in range(num_blocks):
        cluster.write(block)
    cluster.write(b"small\n", "env_workers/reverse-text@1.log")
    cluster.exchange()
    assert cluster.read("env_workers/reverse-text@1.log") == b"small\n"
    while cluster.exchange():
        pass
    expected, found = hashlib.sha256(), hashlib.sha256(cluster.read())
    for _ in range(num_blocks):
        expected.update(block)
    assert found.digest() == expected.digest()


def test_a_log_that_is_truncated_or_removed_goes_on_and_says_so(cluster: Cluster) -> None:
    cluster.write(b"before\n")
    cluster.exchange()
    cluster.exchange()
    log = cluster.own.layout.log_file("inference.stdout")
    log.write_bytes(b"new\n")
    cluster.exchange()
    cluster.exchange()
    log.unlink()
    cluster.exchange()
    cluster.write(b"last\n")
    cluster.exchange()
    note = b"(node 1 writes another file from here on; the end of the one before may be missing)\n"
    assert cluster.read() == b"before\n" + note + b"new\n" + note + b"last\n"


def test_the_log_of_another_actor_starts_on_a_line_of_its_own(cluster: Cluster) -> None:
    cluster.write(b"whole\ncu")
    cluster.exchange()
    cluster.write(b"t\n")  # lost with its actor
    cluster.begin_actor()
    cluster.write(b"cu")
    cluster.exchange()
    assert cluster.read().splitlines()[:2] == [b"whole", b"cu"]
    assert b"another file" in cluster.read().splitlines()[2]
    assert cluster.read().endswith(b"\ncu")


def test_a_node_that_was_cut_off_goes_on_where_it_was(cluster: Cluster) -> None:
    cluster.write(b"one\n")
    cluster.exchange()
    cluster.write(b"two\n")
    cluster.table.begin_session(NODE)  # it counted as lost
    cluster.exchange()
    assert cluster.read() == b"one\ntwo\n"


def test_a_resumed_driver_appends_what_its_new_actors_write(cluster: Cluster) -> None:
    cluster.write(b"one\ntw")
    cluster.exchange()
    cluster.begin_driver()
    cluster.begin_actor()
    cluster.write(b"three\n")
    cluster.exchange()
    cluster.exchange()
    assert cluster.read() == b"one\ntw\nthree\n"


def test_a_part_is_written_once_the_disk_has_space_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space", str(path))

    cluster.write(b"one\n")
    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", refuse)
        cluster.exchange()
    assert cluster.read() == b""
    cluster.exchange()
    assert cluster.read() == b"one\n"


def test_the_thread_copies_until_the_end_and_does_not_wait_for_a_directory_that_hangs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copying_logs(cluster.table, cluster.first.logs):
        cluster.write(b"one\n")
        cluster.send()
        wait_until(lambda: cluster.read() == b"one\n", timeout_s=20, waiting_for="the log")
        cluster.write(b"two\n")
        cluster.send()
    assert cluster.read() == b"one\ntwo\n"
    may_answer = threading.Event()
    monkeypatch.setattr(own_directory, "copy_logs", lambda *_: may_answer.wait(60))
    monkeypatch.setattr(own_directory, "_CLOSE_TIMEOUT_S", 0.01)
    with copying_logs(cluster.table, cluster.first.logs):
        cluster.send()
    may_answer.set()


@pytest.mark.parametrize("name", ["/etc/passwd", "../run.json", "a/../../b", "a\n/../b", ".."])
def test_a_log_outside_the_directory_of_logs_is_refused(name: str) -> None:
    part = LogPart(source="x", offset=0, data=b"x")
    observed = Observed(session=0, observed_at=0, time=0, facts=make_facts(), logs={name: part})
    with pytest.raises(msgspec.ValidationError):
        decode(encode(observed), Observed)
    assert decode(encode(msgspec.structs.replace(observed, logs={"a..b/c.log": part})), Observed).logs


def test_the_secret_and_the_configurations_are_for_their_owner_alone(cluster: Cluster) -> None:
    files = {"outputs/.secret": TOKEN, "outputs/configs/inference.toml": 'api_key = "x"\n'}
    os.umask(before := os.umask(0))
    cluster.own.write(files)
    os.umask(before)
    layout = cluster.own.layout
    assert read_secret(layout.secret).token == TOKEN  # which refuses a file that others may read
    assert (layout.configs / "inference.toml").read_text() == files["outputs/configs/inference.toml"]
    modes = {path.relative_to(layout.root).as_posix(): path.stat().st_mode & 0o777 for path in layout.root.rglob("*.toml")}
    assert modes == {"configs/inference.toml": 0o600}
    assert (layout.secret.stat().st_mode & 0o777, layout.root.stat().st_mode & 0o777) == (0o600, 0o700)
    inode = layout.secret.stat().st_ino
    cluster.own.write({**files, "outputs/configs/inference.toml": "changed"})
    assert layout.secret.stat().st_ino == inode
    assert (layout.configs / "inference.toml").read_text() == "changed"


def test_nothing_prints_what_is_sent() -> None:
    message = Desired(session=1, number=2, seen=0, listeners=(), files={"outputs/.secret": TOKEN})
    assert TOKEN not in f"{message} {message!r}"
    assert "outputs/.secret" in repr(message)


def test_a_process_reads_and_writes_in_the_directory_of_its_node(cluster: Cluster) -> None:
    there, here = RunLayout(OUTPUT_DIR), cluster.own.layout
    cluster.own.write({"outputs/configs/inference.toml": ""})
    argv = ("python", "-m", "role", "@", "outputs/configs/inference.toml", "outputs/other")
    spec = replace(make_spec(there, "inference"), argv=argv, reports=report_files(there, "inference"))
    moved = cluster.own.redirect(spec)
    assert moved.argv == (*argv[:4], str(here.configs / "inference.toml"), "outputs/other", "--output-dir", str(here.root))
    assert moved.log == here.log_file("inference.stdout")
    assert [report.path for report in moved.reports] == [here.report_file("inference")]


def test_the_note_of_temporary_files_is_in_a_directory_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notes = {scratch_note_of(Path(output_dir), node=node) for output_dir in ("a", "b") for node in (1, 2)}
    assert len(notes) == 4
    (directory,) = {note.parent for note in notes}
    assert directory.stat().st_mode & 0o777 == 0o700
