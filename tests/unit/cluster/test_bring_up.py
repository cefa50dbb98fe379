"""Bring a node of a job up, without Ray; tests/integration/test_bring_up.py does it with Ray."""

import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from trivet.cluster import bring_up, ray_node
from trivet.cluster.bring_up import Head, await_head, is_over, main
from trivet.cluster.ray_node import RayNode, Signals, certify, make_authority
from trivet.errors import NodesMissing
from trivet.storage.durable import write_json_atomically


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch, signals: Signals) -> list[list[str]]:
    """Have Ray start at once, and start nothing; return the words of each start."""
    started: list[list[str]] = []

    def start(_: RayNode, words: list[str], **_words: object) -> bool:
        started.append(words)
        return True

    monkeypatch.setattr(RayNode, "start", start)
    monkeypatch.setattr(RayNode, "is_running", lambda _: True)
    monkeypatch.setattr(RayNode, "stop", lambda _: None)
    monkeypatch.setattr(bring_up, "own_address", lambda _: "127.0.0.1")
    monkeypatch.setattr(bring_up, "adopt_orphans", lambda: None)
    monkeypatch.setattr(bring_up, "_POLL_INTERVAL_S", 0.02)
    return started


def words(directory: Path, *command: str, index: int = 0) -> list[str]:
    return ["--directory", str(directory), "--job", "17.0", "--index", str(index), "--", *command]


def head_at(directory: Path, port: int) -> Head:
    directory.mkdir(exist_ok=True)
    head = Head("127.0.0.1", port)
    write_json_atomically(directory / "head.json", head)
    return head


def test_a_job_is_a_name_without_a_slash(tmp_path, signals):
    with pytest.raises(SystemExit) as raised:
        main(["--directory", str(tmp_path), "--job", "../17", "--", "true"])
    assert raised.value.code == 2


def test_a_certificate_is_of_the_authority_and_names_its_addresses(tmp_path):
    make_authority(tmp_path)
    (own := tmp_path / "own").mkdir()
    certify(tmp_path, own, addresses=["10.0.0.7", "127.0.0.1"])
    issuer, found = (x509.load_pem_x509_certificate(file.read_bytes()) for file in (tmp_path / "ca.crt", own / "node.crt"))
    found.verify_directly_issued_by(issuer)
    assert isinstance(found.public_key(), ec.EllipticCurvePublicKey)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(map(str, names.get_values_for_type(x509.IPAddress))) == ["10.0.0.7", "127.0.0.1"]
    for key in (tmp_path / "ca.key", own / "node.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


SHOW = """
import json, os, stat, sys
from pathlib import Path
token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (token, token.parent, token.parent / "ca.key")}
modes["node.key"] = stat.S_IMODE(os.stat(os.environ["RAY_TLS_SERVER_KEY"]).st_mode)
Path(sys.argv[1]).write_text(json.dumps([modes, os.environ["RAY_ADDRESS"], len(token.read_text()), str(token.parent)]))
raise SystemExit(75)
"""


def test_the_first_node_keeps_its_secrets_to_its_owner_and_ends_as_its_command(tmp_path, without_ray):
    old = tmp_path / "ray-17.0"
    old.mkdir()
    (old / "token").write_text("of an earlier start")
    assert main(words(tmp_path, sys.executable, "-c", SHOW, str(tmp_path / "shown"))) == 75
    modes, address, length, directory = json.loads((tmp_path / "shown").read_text())
    assert modes == {"token": 0o600, "ca.key": 0o600, "node.key": 0o600, "ray-17.0": 0o700}
    assert length == 64
    (started,) = without_ray
    assert f"--port={address.rpartition(':')[2]}" in started
    assert directory == str(old)
    assert not old.exists()  # the other nodes end
    assert (tmp_path / "17.0.code").read_text() == "75\n"


def test_a_first_node_without_ray_can_be_started_again(tmp_path, without_ray, monkeypatch):
    monkeypatch.setattr(RayNode, "start", lambda *_, **__: False)
    assert main(words(tmp_path, "true")) == NodesMissing.exit_code
    assert (tmp_path / "17.0.code").read_text() == "75\n"


def test_an_exit_code_that_cannot_be_noted_is_still_that_of_the_job(tmp_path, without_ray, capsys):
    (tmp_path / "17.0.code").mkdir()
    assert main(words(tmp_path, sys.executable, "-c", "raise SystemExit(3)")) == 3
    assert "exit code 3 was not noted" in capsys.readouterr().err


def test_the_files_of_a_bring_up_that_was_killed_are_removed_by_the_next_one(tmp_path, monkeypatch):
    make_authority(tmp_path)
    monkeypatch.setattr(ray_node, "_PREFIX", f"trivet-test-{os.getpid()}-")
    left = Path(f"/tmp/trivet-test-{os.getpid()}-left")
    left.mkdir()

    def make() -> RayNode:
        return RayNode(tmp_path, address="127.0.0.1", num_gpus=0, num_cpus=1, lost_after_s=30.0)

    first = make()
    second = make()
    assert (left.exists(), first.temporary.exists()) == (False, True)
    for node in (first, second):
        monkeypatch.setattr(node, "stop", lambda: None)
        node.remove()
        assert not node.temporary.exists()


def test_the_address_of_an_earlier_start_is_not_taken(tmp_path, signals, listener, monkeypatch):
    monkeypatch.setattr(bring_up, "_POLL_INTERVAL_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    head_at(tmp_path / "job", port)
    assert await_head(tmp_path / "job", timeout_s=0.2, signals=signals) is None
    head = head_at(tmp_path / "job", listener.getsockname()[1])
    assert await_head(tmp_path / "job", timeout_s=20, signals=signals) == head


def test_a_cluster_is_over_when_its_directory_is_gone_or_another(tmp_path):
    head = head_at(tmp_path / "job", 1)
    assert not is_over(tmp_path / "job", head)
    head_at(tmp_path / "job", 2)
    assert is_over(tmp_path / "job", head)
    (tmp_path / "job" / "head.json").unlink()
    assert is_over(tmp_path / "job", head)


def test_another_node_joins_notes_that_it_leaves_and_ends_with_0(tmp_path, without_ray, listener, monkeypatch):
    directory = tmp_path / "ray-17.0"
    head_at(directory, listener.getsockname()[1])
    make_authority(directory)
    leaving: list[bool] = []

    def running(node: RayNode) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        leaving.append(node.leaving.exists())
        (directory / "head.json").unlink()
        return True

    monkeypatch.setattr(RayNode, "is_running", running)
    assert main(words(tmp_path, "unused", index=1)) == 0
    assert leaving == [True]
    assert without_ray == [[f"--address=127.0.0.1:{listener.getsockname()[1]}"]]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the jobs whose lost script was to be replaced, and what was known then of the first node's end."""
    asked: list[object] = []
    monkeypatch.setattr(bring_up, "replace_lost_script", lambda job, *, is_over, **_: asked.extend((job, is_over())))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return asked


def test_a_node_whose_ray_ends_again_and_again_gives_up_and_replaces_the_lost_script(
    tmp_path, without_ray, listener, monkeypatch, watched
):
    directory = tmp_path / "ray-17.0"
    head_at(directory, listener.getsockname()[1])
    make_authority(directory)
    monkeypatch.setattr(RayNode, "is_running", lambda _: False)
    assert main(["--script-host", "node1", *words(tmp_path, "unused", index=1)]) == 0
    assert (len(without_ray), watched) == (bring_up._MAX_STARTS, ["17", False])


def test_a_first_node_that_was_lost_before_its_cluster_was_up_is_replaced_too(tmp_path, without_ray, monkeypatch, watched):
    monkeypatch.setattr(bring_up, "_FIRST_TIMEOUT_S", 0.1)
    assert main(["--script-host", "node1", *words(tmp_path, "unused", index=1)]) == 0
    assert watched == ["17", False]
    watched.clear()
    (tmp_path / "17.0.code").write_text("75\n")  # it was not lost: it has ended, and the batch script acts
    main(["--script-host", "node1", *words(tmp_path, "unused", index=1)])
    assert watched == ["17", True]
    for index in ("0", "4"):  # the first does not watch itself, and three are enough
        watched.clear()
        main(["--script-host", "node1", *words(tmp_path, "true", index=int(index))])
        assert watched == []


def test_a_node_leaves_a_head_that_does_not_answer_and_joins_it_when_it_is_back(tmp_path, without_ray, listener, monkeypatch):
    directory = tmp_path / "ray-17.0"
    head_at(directory, listener.getsockname()[1])
    make_authority(directory)
    now, silent_from_s = [0.0], 100.0

    def sleep(seconds: float) -> None:
        now[0] += 1.0
        if len(without_ray) == 2:
            (directory / "head.json").unlink(missing_ok=True)

    monkeypatch.setattr(bring_up, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(bring_up, "answers", lambda _: not silent_from_s <= now[0] < silent_from_s + 40)
    assert main(words(tmp_path, "unused", index=1)) == 0
    assert len(without_ray) == 2
    assert silent_from_s + 30 <= now[0] <= silent_from_s + 60
