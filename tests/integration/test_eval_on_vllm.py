"""Run `eval` on a real server. Scores of whole weights equal the run's own; adapters, verifiers' command and OpenAI clients work.

One server with adapters serves all tests, one sequence at a time.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from support.adapters import publish_adapter
from support.rl_run import ENVIRONMENTS, Run
from support.servers import reload_weights, run_server, secret_shared
from trivet.config.layout import RunLayout
from trivet.weights.manifest import make_start_manifest, verify

pytestmark = pytest.mark.vllm

STEPS = [1, 2, 3]

RUN = """
max_steps = {max_steps}
seq_len = 128
output_dir = "{output_dir}"
deterministic = true
inference = "None"
model.name = "{model}"
ckpt.interval = 3
ckpt.weights.interval = 1

[trainer]
optim.lr = 1e-2

[orchestrator]
model.name = "{model}"
batch_size = 8
rollouts_per_example = 4
sampling.max_tokens = 12
client.base_url = ["@SERVER@/v1"]

[orchestrator.eval]
interval = 1
num_examples = 5
rollouts_per_example = 2
sampling = {{ max_tokens = 12, seed = 7 }}

[[orchestrator.eval.env]]
id = "vowels"
skip_first = 1

[[orchestrator.env]]
id = "vowels"
"""


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "inference.stdout"
    flags = {"deterministic": "true", "enable_lora": "true", "max_lora_rank": "8", "model.max_model_len": "256"}
    with run_server(tiny_model, log=log, **flags) as server, secret_shared(server):
        yield server.base_url


def run_eval(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ENVIRONMENTS)}
    command = [sys.executable, "-m", "trivet.evaluation.main", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=960, check=False)


def policy(server: str) -> dict[str, object]:
    return httpx.get(f"{server}/policy", timeout=240).json()


def summaries(layout: RunLayout, env: str) -> dict[int, dict[str, object]]:
    found = layout.evals.glob(f"step_*/{env}/summary.json")
    return {summary["step"]: summary for summary in (json.loads(path.read_bytes()) for path in found)}


def test_the_steps_of_a_run_score_what_the_run_itself_measured(server: str, tiny_model: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, tiny_model, max_steps=3, template=RUN.replace("@SERVER@", server))
    try:
        run.start()
        assert run.await_exit() == 0, run.output[-6000:]
    finally:
        run.stop()
    before = policy(server)
    assert before["version"] == 3
    numbers = ["--num-examples", "5", "--rollouts-per-example", "2", "--sampling.max-tokens", "12", "--sampling.seed", "7"]
    words = ["--client.base-url", f"{server}/v1", "--weights-dir", str(run.layout.weights), *numbers]
    done = run_eval(*words, "--output-dir", str(tmp_path / "again"))
    assert done.returncode == 0, done.stdout + done.stderr
    again = RunLayout(tmp_path / "again")
    online, offline = summaries(run.layout, "vowels"), summaries(again, "vowels")
    assert sorted(offline) == [0, *STEPS]
    assert {0, STEPS[-1]} <= online.keys() <= offline.keys(), "a run measures the policies that it lands on"
    for step in online:
        ours, theirs = again.evals_step(step, "vowels"), run.layout.evals_step(step, "vowels")
        assert (ours / "results.jsonl").read_bytes() == (theirs / "results.jsonl").read_bytes()
        assert (ours / "task.json").read_bytes() == (theirs / "task.json").read_bytes()
        assert {**offline[step], "seconds": 0} == {**online[step], "seconds": 0}
    assert offline[0]["digest"] == make_start_manifest(tiny_model).digest
    assert [offline[step]["digest"] for step in STEPS] == [verify(run.layout.weights_step(step)).digest for step in STEPS]
    assert len({(again.evals_step(step, "vowels") / "results.jsonl").read_bytes() for step in offline}) > 1
    assert policy(server) == before, "the server has what it had before"


def test_adapters_are_evaluated_and_one_of_another_base_is_refused(server: str, tiny_model: Path, tmp_path: Path) -> None:
    reload_weights(server)
    layout = RunLayout(tmp_path / "run")
    for version in (1, 2):
        publish_adapter(layout, base=tiny_model, version=version)
    words = ["--client.base-url", f"{server}/v1", "--weights-dir", str(layout.weights), "--env.id", "vowels"]
    words += ["--num-examples", "2", "--sampling.max-tokens", "12", "--sampling.temperature", "0"]
    done = run_eval(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = summaries(layout, "vowels")
    digests = {step: found[step]["digest"] for step in found}
    assert digests == {0: make_start_manifest(tiny_model).digest} | {
        version: verify(layout.weights_step(version)).digest for version in (1, 2)
    }
    texts = {(layout.evals_step(step, "vowels") / "results.jsonl").read_bytes() for step in found}
    assert len(texts) == 3, "each adapter answers in its own way"
    other = shutil.copytree(tiny_model, tmp_path / "other")
    foreign = RunLayout(tmp_path / "foreign")
    publish_adapter(foreign, base=other, version=1)
    words[words.index(str(layout.weights))] = str(foreign.weights)
    done = run_eval(*words)
    assert done.returncode == 2
    assert f"is an adapter for {other}, and the server serves {tiny_model}" in done.stderr
    assert [path.name for path in foreign.root.iterdir()] == ["weights"]
    assert policy(server)["version"] == 0


def test_a_plain_openai_client_is_answered(server: str, tiny_model: Path) -> None:
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [str(tiny_model)]
        answer = client.chat.completions.create(
            model=str(tiny_model), messages=[{"role": "user", "content": "abc"}], max_tokens=8, temperature=0
        )
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 8
        pieces = client.chat.completions.create(
            model=str(tiny_model), messages=[{"role": "user", "content": "abc"}], max_tokens=8, temperature=0, stream=True
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == answer.choices[0].message.content


def test_the_command_of_verifiers_evaluates_on_our_server(server: str, tiny_model: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "vf-eval"), "reverse-text", "-m", str(tiny_model), "-b", f"{server}/v1"]
    command += [
        "-k",
        "VF_KEY",
        "-n",
        "3",
        "-r",
        "2",
        "-t",
        "8",
        "-T",
        "1.0",
        "--disable-tui",
        "-s",
        "-o",
        str(tmp_path / "out"),
    ]
    environment = os.environ | {"VF_KEY": "none", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=960, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [results] = tmp_path.rglob("results.jsonl")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(records) == 6
    assert all(isinstance(record["reward"], float) and record["completion"] for record in records)
