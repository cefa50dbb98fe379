"""Ask the server over a real socket, and check what it answers and refuses."""

import http.client
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.message import Message
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.big_run import trainer_line, write_run
from support.groups import NO_FILTERS, make_group
from trivet.cli.main import main
from trivet.config.layout import RunLayout
from trivet.errors import ConfigError
from trivet.gate import is_own_name
from trivet.orchestrator.checkpoint import write_rollouts
from trivet.orchestrator.filters import mask_rollouts
from trivet.view.api import Api
from trivet.view.run import ViewedRun, name_runs, open_run
from trivet.view.server import ViewServer, read_pages
from trivet.wire.versions import Step

STEPS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    layout: RunLayout
    port: int

    def ask(self, target: str, *, method: str = "GET", host: str = "", **headers: str) -> Asked:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in {"Host": host or f"127.0.0.1:{self.port}", **headers}.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            response = connection.getresponse()
            return Asked(status=response.status, headers=response.headers, body=response.read())
        finally:
            connection.close()


@contextmanager
def serving(layout: RunLayout) -> Iterator[Site]:
    server = ViewServer(Api([ViewedRun(layout, name="run")]), host="127.0.0.1", port=0)
    with server.serving():
        yield Site(layout=layout, port=server.port)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    layout = write_run(tmp_path_factory.mktemp("runs") / "run", num_steps=STEPS)
    with serving(layout) as site:
        yield site


def test_the_page_and_its_files_are_served_with_a_policy_that_allows_nothing_else(site: Site):
    for path in read_pages():
        found = site.ask(path)
        assert found.status == 200
        assert "default-src 'none'; script-src 'self'" in found.headers["Content-Security-Policy"]
        assert found.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "target",
    [
        "/../pyproject.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/api/../status.json",
        "/status.json",
        "/api/nothing",
        "/api/rollouts?step=99",
        "/api/rollouts?step=1&eval=../../status.json",
        "/api/rollouts?step=0&eval=/etc",
        "/api/rollout?step=1&line=999",
    ],
)
def test_nothing_but_what_was_listed_is_found(site: Site, target: str):
    found = site.ask(target)
    assert found.status == 404
    assert set(found.json) == {"error"}


@pytest.mark.parametrize(
    "query",
    [
        "run=1",
        "run=-1",
        "run=x",
        "run=%F0%9D%9F%98",
        "points=1",
        "points=9999",
        "from=1e3",
        "names=a&points=" + "9" * 5000,
    ],
)
def test_a_query_of_the_wrong_form_is_refused_with_what_is_allowed(site: Site, query: str):
    found = site.ask(f"/api/series?{query}")
    assert found.status == 400
    assert "must be a number from" in found.json["error"]


@pytest.mark.parametrize("names", ["../../etc:loss", "nobody:loss/mean", ":", "trainer:", "trainer:step", ",,,"])
def test_a_metric_of_nobody_has_no_curve(site: Site, names: str):
    assert not any(site.ask(f"/api/series?names={names}").json["curves"].get(name) for name in names.split(",") if name)


@pytest.mark.parametrize(("target", "status"), [("/api/series?names=" + "a" * 9000, 414), ("http://[bad/api/runs", 404)])
def test_an_address_that_cannot_be_read_is_answered(site: Site, target: str, status: int):
    assert site.ask(target).status == status


def test_a_file_of_metrics_that_leads_elsewhere_takes_nothing_from_the_others(tmp_path: Path):
    layout = write_run(tmp_path / "run", num_steps=2)
    (tmp_path / "secret").write_text('{"step": 1, "secret": 1}\n')
    (layout.metrics / "evil.jsonl").symlink_to(tmp_path / "secret")
    api = Api([ViewedRun(layout, name="run")])
    names = json.loads(api.answer("/api/metrics", {}, client_tag="").body)
    assert "trainer:loss/mean" in names
    assert not [name for name in names if name.startswith("evil")]
    assert json.loads(api.answer("/api/series", {"names": "evil:secret"}, client_tag="").body)["curves"] == {
        "evil:secret": None
    }


@pytest.mark.parametrize(
    ("status", "hosts"),
    [
        (403, ["evil.example", "evil.example:80", "169.254.1.1", "localhost.evil.example", "[bad", " "]),
        (200, ["localhost:1", "127.0.0.1", "[::1]:80"]),
    ],
)
def test_only_a_request_under_a_name_of_this_machine_is_answered(site: Site, status: int, hosts: list[str]):
    # A page of another site has its name resolve to this machine. The browser then sends that name.
    assert [site.ask("/api/status", host=host).status for host in hosts] == [status] * len(hosts)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_sent(site: Site, method: str):
    found = site.ask("/api/status", method=method)
    assert found.status == 405
    assert "Access-Control-Allow-Origin" not in found.headers


def test_an_answer_that_has_not_changed_is_not_sent_again(site: Site):
    target = "/api/series?names=trainer:loss/mean"
    first = site.ask(target)
    again = site.ask(target, If_None_Match=first.headers["ETag"])
    assert (again.status, again.body) == (304, b"")
    with site.layout.metrics.joinpath("trainer.jsonl").open("ab") as file:
        file.write(trainer_line(STEPS + 1, np.random.default_rng(3), num_steps=STEPS + 1))
    changed = site.ask(target, If_None_Match=first.headers["ETag"])
    assert changed.status == 200
    assert changed.json["curves"]["trainer:loss/mean"]["steps"][-1] == STEPS + 1


def test_large_answers_are_compressed_for_who_can_read_them(site: Site):
    assert site.ask("/app.js", Accept_Encoding="gzip").headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in site.ask("/app.js").headers


def test_who_waits_for_whom_is_told_by_step_and_over_all(site: Site):
    found = site.ask("/api/timeline?last=20&steps=5").json
    assert (found["first_step"], found["last_step"]) == (16, 20)
    trainer = [span for span in found["spans"] if span["role"] == "trainer" and span["step"] == 18]
    assert [(span["activity"], span["waits_for"]) for span in trainer] == [
        ("waits for a batch", "orchestrator"),
        ("forward and backward", ""),
        ("optimizer", ""),
        ("scores the policy's probe", ""),
        ("publishes weights", ""),
        ("other work", ""),
    ]
    assert trainer[0]["end"] - trainer[0]["start"] == pytest.approx(3.0)
    shares = {(share["role"], share["activity"]): share["fraction"] for share in found["shares"]}
    assert shares["trainer", "waits for a batch"] == pytest.approx(3 / 12)
    assert shares["orchestrator", "waits for rollouts"] == pytest.approx(9 / 12)
    assert {note["event"] for note in found["notes"]} == {"load", "commit"}
    # A load is over when it is noted.
    generation = next(span for span in found["spans"] if span["activity"] == "generates rollouts")
    assert generation["role"] == "inference"
    waiting = next(span for span in found["spans"] if span["waits_for"] == "inference")
    assert (generation["start"], generation["end"]) == (waiting["start"], waiting["end"])
    load = next(span for span in found["spans"] if span["activity"].startswith("loads a policy"))
    assert load["end"] - load["start"] == pytest.approx(0.8)


def test_values_that_may_be_secrets_are_not_sent(site: Site):
    found = site.ask("/api/config")
    assert b"sk-not-to-be-shown" not in found.body
    assert found.json["orchestrator"]["client.api_key"] == "(not shown: it may be a secret)"
    assert found.json["orchestrator"]["env[0].args.depth"] == "3"


def test_a_rollout_comes_with_its_tokens(site: Site):
    found = site.ask("/api/rollout?step=7&line=2").json
    [sample] = found["samples"]
    assert sample["texts"] is None  # no weights, no tokenizer
    assert sample["sampler_logprobs"][:16] == [None] * 16
    assert sample["versions"][16:] == [5] * 10 + [6] * 38


def test_a_rollout_that_is_masked_from_the_loss_shows_its_log_probabilities_and_says_so(tmp_path: Path):
    group = make_group(0)
    group.rollouts[1].samples[0].is_truncated = True
    mask_rollouts(group, NO_FILTERS, masks_truncated=True)
    layout = write_run(tmp_path / "run", num_steps=1)
    write_rollouts(layout, Step(1), [group])
    with serving(layout) as site:
        [trained] = site.ask("/api/rollout?step=1&line=0").json["samples"]
        [masked] = site.ask("/api/rollout?step=1&line=1").json["samples"]
    assert trained["sampler_logprobs"] == masked["sampler_logprobs"] == [None] * 3 + [-1.0] * 4
    assert trained["versions"] == masked["versions"] == [None] * 3 + [0] * 4
    assert ("filtered" in trained["reasons"], "filtered" in masked["reasons"]) == (False, True)


def test_nothing_is_written(site: Site):
    before = {path: path.stat().st_mtime_ns for path in sorted(site.layout.root.rglob("*"))}
    for target in ("/", "/api/status", "/api/series", "/api/timeline", "/api/rollouts?step=3", "/api/evals", "/api/config"):
        assert site.ask(target).status == 200
    assert {path: path.stat().st_mtime_ns for path in sorted(site.layout.root.rglob("*"))} == before


def test_a_directory_that_holds_no_run_is_refused_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for directory in (tmp_path, tmp_path / "nowhere"):
        assert main(["view", str(directory)]) == 2
        assert "give a run's output_dir" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_said(site: Site):
    with pytest.raises(ConfigError, match=r"--port 0 finds a free one"):
        ViewServer(Api([]), host="127.0.0.1", port=site.port)


def test_a_wider_host_is_named_by_a_usable_address_and_answers_to_the_machines_addresses(site: Site):
    server = ViewServer(Api([ViewedRun(open_run(site.layout.root), name="run")]), host="0.0.0.0", port=0)
    with server.serving():
        assert server.url == f"http://localhost:{server.port}/"
    assert is_own_name("10.1.2.3:80", host="0.0.0.0")
    assert not is_own_name("evil.example", host="0.0.0.0")


def test_runs_are_named_by_their_directories_and_by_what_tells_them_apart():
    assert name_runs([Path("/x/a/outputs"), Path("/x/b/outputs")]) == ["a/outputs", "b/outputs"]
    assert name_runs([Path("/a/x/run"), Path("/b/x/run")]) == ["a/x/run", "b/x/run"]


def test_the_library_that_draws_charts_comes_with_its_license():
    found = {item.name: item.read_text() for item in files("trivet.view").joinpath("static").iterdir()}
    assert found["uPlot.LICENSE"].startswith("The MIT License")
    named = re.findall(r'(?:src|href)="/([^"]+)"', found["index.html"])
    assert {"uPlot.iife.min.js", "uPlot.min.css"} < set(named) <= set(found)


def test_text_never_becomes_html_in_the_page():
    # Models write the rollouts. The page's scripts have no way to parse text as markup or code.
    ways = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|ContextualFragment|srcdoc"
    )
    for item in files("trivet.view").joinpath("static").iterdir():
        assert not ways.search(item.read_text(encoding="utf-8")), item.name


def test_a_line_that_is_nested_too_deep_costs_itself_alone(tmp_path: Path):
    layout = write_run(tmp_path / "run", num_steps=STEPS)
    path = layout.metrics / "trainer.jsonl"
    lines = path.read_text().splitlines()
    deep = '{"step": 3, "time": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    huge = '{"step": ' + "9" * 5000 + ', "time": 1}'
    far = '{"step": 1e300, "time": 1}'
    path.write_text("\n".join([*lines[:10], deep, huge, far, *lines[10:], deep]) + "\n")
    api = Api([ViewedRun(layout, name="run")])
    answer = json.loads(api.answer("/api/series", {"names": "trainer:loss/mean"}, client_tag="").body)
    assert len(answer["curves"]["trainer:loss/mean"]["steps"]) == STEPS
    assert answer["num_damaged"] == 4
    assert api.answer("/api/metrics", {}, client_tag="").body


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("metrics/trainer.jsonl", "/api/series?names=trainer:loss/mean"),
        ("metrics/trainer.jsonl", "/api/metrics"),
        ("status.json", "/api/status"),
        ("events.jsonl", "/api/timeline"),
        ("rollouts/step_1/rollouts.jsonl", "/api/rollouts?step=1"),
        ("configs/trainer.toml", "/api/config"),
        ("evals/step_1/a/summary.json", "/api/evals"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_hangs_nothing(name: str, target: str, tmp_path: Path):
    layout = write_run(tmp_path / "run", num_steps=STEPS)
    path = layout.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    path.with_name("results.jsonl").touch()
    with serving(layout) as site:
        assert site.ask(target).status in (200, 404)


def test_idle_connections_do_not_keep_others_out(tmp_path: Path):
    layout = write_run(tmp_path / "run", num_steps=STEPS)
    with serving(layout) as site, ExitStack() as held:
        for _ in range(200):
            held.enter_context(socket.create_connection(("127.0.0.1", site.port), timeout=10))
        assert site.ask("/api/runs").status == 200
