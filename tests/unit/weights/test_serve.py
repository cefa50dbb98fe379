from pathlib import Path

import httpx
import pytest

from support.policy_servers import TOKEN, PolicyServer, publish_files
from trivet.config.layout import MANIFEST, RunLayout
from trivet.weights.fetch import partial_directory
from trivet.weights.manifest import read_manifest

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path)
    publish_files(made, 3, model=b"0123456789")
    (made.weights_step(3) / "unlisted.txt").write_text("not published")
    made.secret.write_text("secret")
    return made


def ask(server: PolicyServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}/weights/{path}", headers=BEARER | headers, timeout=20)


def test_files_of_a_policy_are_served_whole_and_in_parts(layout: RunLayout) -> None:
    digest = read_manifest(layout.weights_step(3)).digest
    with PolicyServer(layout.weights) as server:
        whole = ask(server, f"3/{digest}/model.safetensors")
        assert (whole.status_code, whole.content) == (200, b"0123456789")
        part = ask(server, f"3/{digest}/model.safetensors", Range="bytes=7-")
        assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"789", "bytes 7-9/10")
        assert ask(server, f"3/{digest}/model.safetensors", Range="bytes=10-").status_code == 416
        assert ask(server, f"3/{digest}/{MANIFEST}").content == (layout.weights_step(3) / MANIFEST).read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        "3/{digest}/unlisted.txt",
        "3/{digest}/STABLE",
        "3/{digest}/..%2F..%2F.secret",
        "3/{digest}/%2e%2e/%2e%2e/.secret",
        "3/{digest}/",
        "3/{other}/model.safetensors",
        "3/*/model.safetensors",
        "4/{digest}/model.safetensors",
        "03/{digest}/model.safetensors",
        "..%2Fweights%2Fstep_3/{digest}/model.safetensors",
        "3/{digest}/model.safetensors%00",
        "readers/{digest}/x",
    ],
)
def test_nothing_but_files_of_the_named_policy_is_served(layout: RunLayout, path: str) -> None:
    digest = read_manifest(layout.weights_step(3)).digest
    with PolicyServer(layout.weights) as server:
        answer = ask(server, path.format(digest=digest, other="0" * 64))
    assert answer.status_code == 404
    assert b"secret" not in answer.content


def test_a_link_and_several_parts_of_a_file_are_refused(layout: RunLayout) -> None:
    path = f"3/{read_manifest(layout.weights_step(3)).digest}/model.safetensors"
    with PolicyServer(layout.weights) as server:
        assert ask(server, path, Range="bytes=0-1,3-4").status_code == 400
        (layout.weights_step(3) / "model.safetensors").unlink()
        (layout.weights_step(3) / "model.safetensors").symlink_to(layout.secret)
        assert ask(server, path).status_code == 404


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {TOKEN}"}])
def test_the_secret_is_required(layout: RunLayout, headers: dict[str, str]) -> None:
    digest = read_manifest(layout.weights_step(3)).digest
    with PolicyServer(layout.weights) as server:
        answer = httpx.get(f"{server.url}/weights/3/{digest}/{MANIFEST}", headers=headers, timeout=20)
        assert answer.status_code == 401
        foreign = httpx.get(
            f"{server.url}/weights/3/{digest}/{MANIFEST}", headers=BEARER | {"Host": "evil.example"}, timeout=20
        )
        assert foreign.status_code == 403


def test_transfers_are_bounded_and_end_with_their_readers(layout: RunLayout) -> None:
    directory = publish_files(layout, 4, model=bytes(64 << 20))  # more than sockets buffer
    path = f"4/{read_manifest(directory).digest}/model.safetensors"
    with PolicyServer(layout.weights, max_transfers=2) as server, httpx.Client(headers=BEARER, timeout=20) as client:
        url = f"{server.url}/weights/{path}"
        with client.stream("GET", url) as first, client.stream("GET", url) as second:
            assert (first.status_code, second.status_code) == (200, 200)
            assert ask(server, path).status_code == 503
        answers = (ask(server, path, Range="bytes=67108863-") for _ in range(1000))
        assert 206 in (answer.status_code for answer in answers), "the server notices that both readers have left"


def test_a_reader_that_takes_nothing_is_dropped(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.weights.serve._SEND_TIMEOUT_S", 0.05)
    directory = publish_files(layout, 4, model=bytes(64 << 20))  # more than sockets buffer
    path = f"4/{read_manifest(directory).digest}/model.safetensors"
    with PolicyServer(layout.weights, max_transfers=1) as server, httpx.Client(headers=BEARER, timeout=20) as client:
        stuck = client.send(client.build_request("GET", f"{server.url}/weights/{path}"), stream=True)
        assert stuck.status_code == 200
        answers = (ask(server, path, Range="bytes=67108863-") for _ in range(1000))
        assert 206 in (answer.status_code for answer in answers)
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
            stuck.read()


def test_a_policy_that_is_being_fetched_is_served_as_far_as_it_is_verified(layout: RunLayout) -> None:
    digest = read_manifest(layout.weights_step(3)).digest
    partial = partial_directory(layout.weights, 3, digest)
    layout.weights_step(3).rename(partial)
    (partial / "model.safetensors").rename(partial / "model.safetensors.partial")
    with PolicyServer(layout.weights) as server:
        assert ask(server, f"3/{digest}/{MANIFEST}").status_code == 200
        assert ask(server, f"3/{digest}/model.safetensors").status_code == 404
        assert ask(server, f"3/{digest}/model.safetensors.partial").status_code == 404
        (partial / "model.safetensors.partial").rename(partial / "model.safetensors")
        assert ask(server, f"3/{digest}/model.safetensors").content == b"0123456789"
