"""A node with a directory of its own gets the files that it reads, and its logs reach the first node, whatever is lost between."""

import hashlib
import os
import resource
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from support.fake_roles import make_facts, make_spec
from trivet.cluster import table
from trivet.cluster.messages import Desired, DesiredProcess, LogPart, Observed, decode, encode
from trivet.cluster.own_directory import OwnDirectory, append_logs, read_files, scratch_note_of
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
        logs = self.own.read_logs(decode(encode(desired), Desired).received)
        observed = Observed(session=desired.session, observed_at=self.num_observed, time=0, facts=make_facts(), logs=logs)
        message = encode(observed)
        assert len(message) < 100 << 10, "Ray would put it into its object store"
        self.receive(decode(message, Observed))
        return observed

    def receive(self, observed: Observed) -> None:
        self.table.receive(NODE, observed, now=0.0, unix_time=0.0)

    def copy(self) -> None:
        append_logs(self.table.log_parts, self.first.logs)

    def exchange(self) -> tuple[LogPart, ...]:
        """Have the node's logs copied; return the parts that it sent."""
        observed = self.send()
        self.copy()
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
    assert cluster.exchange() == ()


def test_what_is_lost_or_arrives_twice_or_late_changes_nothing(cluster: Cluster) -> None:
    cluster.write(b"first\n")
    early = cluster.send()
    cluster.receive(early)
    cluster.write(b"second\n")
    longer = cluster.own.read_logs({})  # the node does not know yet that the first line has arrived
    cluster.receive(msgspec.structs.replace(early, observed_at=early.observed_at + 0.5, logs=longer))
    cluster.copy()
    assert cluster.read() == b"first\nsecond\n"
    cluster.write(b"third\n")
    cluster.exchange()
    cluster.receive(early)
    cluster.exchange()
    assert cluster.read() == b"first\nsecond\nthird\n"


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


def test_the_log_of_another_actor_starts_on_a_line_of_its_own(cluster: Cluster) -> None:
    cluster.write(b"whole\ncu")
    cluster.send()  # the actor ends before this is written
    cluster.write(b"t\n")  # lost with its actor
    cluster.begin_actor()
    cluster.write(b"another")
    cluster.exchange()
    first, second, note, last = cluster.read().splitlines()
    assert (first, second, last) == (b"whole", b"cu", b"another")
    assert note.startswith(b"(another file")


def test_a_node_that_was_cut_off_goes_on_where_it_was(cluster: Cluster) -> None:
    cluster.write(b"one\n")
    cluster.exchange()
    cluster.write(b"two\n")
    assert cluster.table.is_lost(NODE, now=31.0)
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
    first, second, _, last = cluster.read().splitlines()
    assert (first, second, last) == (b"one", b"tw", b"three")


def test_what_cannot_be_written_is_written_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_MAX_LOG_PARTS", 3)
    cluster.first.root.mkdir()
    cluster.first.logs.touch()  # no directory can be made there
    for number in range(5):
        cluster.write(b"%d\n" % number)
        cluster.exchange()
    assert len(cluster.table.log_parts) == 3
    cluster.first.logs.unlink()
    cluster.copy()
    cluster.exchange()
    assert cluster.read() == b"0\n1\n2\n3\n4\n"


def test_a_file_that_is_only_begun_on_a_full_disk_is_ended_later(cluster: Cluster) -> None:
    cluster.write(data := b"x" * 50_000)
    cluster.send()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        cluster.copy()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert cluster.read() == data[:20_000]
    cluster.copy()
    assert cluster.read() == data


@pytest.mark.parametrize("name", ["/etc/passwd", "../run.json", "a/../../b", "a\n/../b", ".."])
def test_a_log_outside_the_directory_of_logs_is_refused(name: str) -> None:
    part = LogPart(name=name, offset=0, data=b"x")
    with pytest.raises(msgspec.ValidationError):
        decode(encode(part), LogPart)
    assert decode(encode(msgspec.structs.replace(part, name="a..b/c.log")), LogPart)


def test_the_secret_and_the_configurations_are_sent_to_nodes_without_the_directory(cluster: Cluster) -> None:
    config = cluster.first.configs / "inference.toml"
    config.parent.mkdir(parents=True)
    config.write_text("x = 1\n")
    spec = replace(make_spec(cluster.first, "inference"), argv=("python", "@", str(config), "outputs/other"), node=NODE)
    files = read_files(spec, layout=cluster.first, nodes={NODE})
    assert files == {str(config): "x = 1\n", str(cluster.first.secret): read_secret(cluster.first.secret).token}
    assert read_files(spec, layout=cluster.first, nodes={2}) == {}


def test_a_process_reads_and_writes_in_the_directory_of_its_node_which_is_for_its_owner_alone(cluster: Cluster) -> None:
    there, here = RunLayout(OUTPUT_DIR), cluster.own.layout
    files = {str(there.secret): TOKEN, str(there.configs / "inference.toml"): 'api_key = "x"\n'}
    argv = ("python", "-m", "role", "@", "outputs/configs/inference.toml", "outputs/other")
    spec = replace(make_spec(there, "inference"), argv=argv, reports=report_files(there, "inference"))
    os.umask(before := os.umask(0))
    moved = cluster.own.prepare(spec, files)
    os.umask(before)
    assert moved.argv == (*argv[:4], str(here.configs / "inference.toml"), "outputs/other", "--output-dir", str(here.root))
    assert moved.log == here.log_file("inference.stdout")
    assert [report.path for report in moved.reports] == [here.report_file("inference")]
    assert read_secret(here.secret).token == TOKEN  # which refuses a file that others may read
    assert (here.configs / "inference.toml").read_text() == 'api_key = "x"\n'
    modes = {path.relative_to(here.root).as_posix(): path.stat().st_mode & 0o777 for path in here.root.rglob("*.toml")}
    assert modes == {"configs/inference.toml": 0o600}
    assert (here.secret.stat().st_mode & 0o777, here.root.stat().st_mode & 0o777) == (0o600, 0o700)
    cluster.own.prepare(spec, {**files, str(there.configs / "inference.toml"): "changed"})
    assert (here.configs / "inference.toml").read_text() == "changed"


def test_nothing_prints_what_is_sent() -> None:
    process = DesiredProcess(number=1, spec=make_spec(RunLayout(OUTPUT_DIR), "inference"), files={"outputs/.secret": TOKEN})
    message = Desired(session=1, number=2, seen=0, listeners=(), processes=(process,))
    assert TOKEN not in f"{message} {message!r}"
    assert "outputs/.secret" in repr(message)


def test_the_note_of_temporary_files_is_in_a_directory_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notes = {scratch_note_of(Path(output_dir), node=node) for output_dir in ("a", "b") for node in (1, 2)}
    assert len(notes) == 4
    (directory,) = {note.parent for note in notes}
    assert directory.stat().st_mode & 0o777 == 0o700
