"""Run the command as a user does: environments in worker processes, servers over real sockets, signals and exit codes."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from support.fake_inference import FakeInference
from support.http_fake import serve_fake
from support.processes import descendants_of, find_free_port, heed_signals, still_alive, wait_until
from support.rl_run import ENVIRONMENTS
from trivet.config.layout import RunLayout
from trivet.weights.publish import publish


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path / "run")
    publish(layout, version=1, run_id="run", write=lambda path: (path / "model.safetensors").write_bytes(b"1"))
    return layout


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trivet.evaluation.main", "--env.id", "vowels", "--num-examples", "4", *words],
        env=os.environ | {"PYTHONPATH": str(ENVIRONMENTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_signals,
    )


def chats(fake: FakeInference) -> int:
    return [path for _, path, _ in fake.requests].count("/v1/chat/completions")


def test_an_interrupted_evaluation_puts_the_server_back_and_goes_on_later(layout):
    may_answer, is_stuck = threading.Event(), threading.Event()

    def script(body):
        if fake.version == 1 and chats(fake) > 6:
            is_stuck.set()
            may_answer.wait(240)
        return [(7, -0.5)]

    fake = FakeInference(script=script)
    with serve_fake(fake) as url:
        words = ["--client.base-url", url, "--weights-dir", str(layout.weights), "--max-concurrent", "1"]
        process = start(*words)
        assert is_stuck.wait(240)
        ours = descendants_of(process.pid)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None, timeout_s=120, waiting_for="the end of eval")
        said, _ = process.communicate()
        may_answer.set()
        assert process.returncode == 130, said
        assert f"--resume-path {layout.root} continues" in said
        assert (fake.version, still_alive(ours)) == (0, [])
        asked_before = chats(fake)
        process = start(*words, "--resume-path", str(layout.root))
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "base │ vowels" in said
    assert "1 │ vowels" in said
    assert chats(fake) - asked_before == 2, "two of step 1's four examples were left, the base was done"
    assert fake.version == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--client.base-url", "http://127.0.0.1:{port}/v1", "--client.wait-for-ready-timeout", "0.1"], "no server answers at"),
        (["--steps", "1,9"], "holds no complete step 9; complete steps there: 1"),
        (["--env.id", "no-such-environment"], "env.id = 'no-such-environment' is not installed"),
        (["--client.endpoint", "nowhere"], "client.endpoint ('nowhere') is not in configs/endpoints.py"),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_leaves_nothing_behind(layout, words, said):
    before = sorted(layout.root.rglob("*"))
    process = start("--weights-dir", str(layout.weights), *[word.format(port=find_free_port()) for word in words])
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert said in output
    assert sorted(layout.root.rglob("*")) == before


def test_a_plain_endpoint_is_evaluated_by_name_with_its_key(tmp_path, monkeypatch):
    asked: list[dict[str, object]] = []

    class Plain(FakeInference):
        def _handle(self, request):
            if request.url.path in ("/policy", "/health"):
                return super()._handle(type(request)("GET", "http://fake/nothing"))
            return super()._handle(request)

        def _chat(self, body):
            asked.append(body)
            answer = super()._chat(body)
            [choice] = answer["choices"]
            return {**answer, "choices": [{name: choice[name] for name in ("index", "finish_reason", "message")}]}

    with serve_fake(Plain(model="other/model", text="aeb")) as url:
        endpoints = tmp_path / "endpoints.py"
        endpoints.write_text(f"ENDPOINTS = {{'mine': {{'url': {url!r}, 'model': 'other/model', 'key': 'local'}}}}\n")
        words = ["--endpoints-path", str(endpoints), "--client.endpoint", "mine", "--output-dir", str(tmp_path / "out")]
        process = start(*words, "--sampling.temperature", "0.5", "--wandb.offline")
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "base │ vowels      │ 0.6667" in output
    assert len(asked) == 4
    assert {name: asked[0][name] for name in asked[0] if name != "messages"} == {"model": "other/model", "temperature": 0.5}
    assert (tmp_path / "out" / "evals" / "step_0" / "vowels" / "summary.json").is_file()
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*"))
