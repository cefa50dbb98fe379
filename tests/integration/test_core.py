"""What the default suite asks of the real inference server: a run from its first step to its page, and policies as they are loaded.

All tests share the one server of the session. The run is killed, ended by a signal, resumed on two ranks, checked and evaluated.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from support.adapters import publish_adapter, write_merged
from support.histories import assert_proven
from support.mutations import judge_many
from support.oracle import Oracle
from support.processes import assert_all_gone, descendants_of, wait_until
from support.rl_run import ENVIRONMENTS, Run
from support.served import assert_serves, busy, chat
from support.servers import ServerProcess, open_client, secret_shared
from support.tiny_models import publish_tiny_model
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import COMMITTED, RunLayout
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.view.run import read_configs
from trivet.weights.manifest import make_start_manifest, verify
from trivet.wire.events import Dispatch, Load, Publish, Restart, Start, Stop

pytestmark = [pytest.mark.core, pytest.mark.vllm]

STEPS_AFTER_RESUME = 8
PLANTED = "planted-secret-4711"
SCORED = "num_examples = 5\nsampling = {{ max_tokens = 12, seed = 7 }}"
"""The evaluations of the run, as `evaluate` repeats them."""
CONFIG = f"""
max_steps = {{max_steps}}
seq_len = 256
output_dir = "{{output_dir}}"
inference = "None"
model.name = "{{model}}"
ckpt.interval = 3
ckpt.weights.interval = 1
trainer.model.compute_dtype = "float32"
trainer.optim.lr = 1e-2

[orchestrator]
batch_size = 16
rollouts_per_example = 4
oversampling_factor = 2.0
sampling.max_tokens = 12
client = {{{{ base_url = ["@SERVER@/v1"], headers = {{{{ Authorization = "Bearer {PLANTED}", "X-Team" = "{PLANTED}" }}}} }}}}
heartbeat.url = "http://me:{PLANTED}@127.0.0.1:9/{PLANTED}?token={PLANTED}"
sampling.extra_body.api_token = "{PLANTED}"
env = [{{{{ id = "vowels", args = {{{{ api_key = "{PLANTED}" }}}} }}}}]

[orchestrator.eval]
interval = 5
env = [{{{{ id = "vowels", args = {{{{ api_key = "{PLANTED}" }}}} }}}}]
{SCORED}
"""


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> Iterator[str]:
    with secret_shared(shared_server):
        yield shared_server.base_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    run: Run
    preempted_at: int
    last_step: int


@pytest.fixture(scope="module")
def finished(server: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """A run whose trainer was killed, which SIGTERM ended, and which two ranks took to its end."""
    run = Run(tmp_path_factory.mktemp("core"), tiny_model, max_steps=1000, template=CONFIG.replace("@SERVER@", server))
    try:
        launcher = run.start()
        run.wait_for(run.layout.checkpoint_step(3) / COMMITTED)
        run.role("trainer").kill()
        wait_until(lambda: restarts_of(run), timeout_s=300, waiting_for="the restart of the trainer")
        run.wait_for(run.layout.checkpoint_step(committed(run) + 3) / COMMITTED)
        family = descendants_of(launcher.pid)
        os.kill(launcher.pid, signal.SIGTERM)
        assert run.await_exit(120) == 143, run.output[-4000:]
        assert_all_gone(family)
        preempted_at = committed(run)
        last_step = preempted_at + STEPS_AFTER_RESUME
        run.start("--ckpt.resume-step", "-1", "--trainer-cpu-ranks", "2", "--max-steps", str(last_step))
        assert run.await_exit() == 0, run.output[-4000:]
        yield Finished(run=run, preempted_at=preempted_at, last_step=last_step)
    finally:
        run.stop()


def committed(run: Run) -> int:
    return committed_steps(run.layout)[-1]


def restarts_of(run: Run) -> list[Restart]:
    return [event for event in read_events(run.layout.events) if isinstance(event, Restart)]


def test_a_run_that_is_killed_ended_and_resumed_on_two_ranks_loses_and_repeats_no_group(finished: Finished) -> None:
    layout = finished.run.layout
    report = assert_proven(check_run(layout))
    assert (report.last_step, report.starts) == (finished.last_step, {"orchestrator": 3, "trainer": 3})
    assert [restart.roles for restart in restarts_of(finished.run)] == [["orchestrator", "trainer"]]
    events = list(read_events(layout.events))
    stops = {(event.role, event.step, event.reason) for event in events if isinstance(event, Stop)}
    assert stops >= {
        (role, step, reason)
        for role in ("orchestrator", "trainer")
        for step, reason in ((finished.preempted_at, "preempted"), (finished.last_step, "done"))
    }
    assert {path.name for path in layout.configs.iterdir()} == {"orchestrator.toml", "trainer.toml"}
    assert finished.run.output.count(f"SUCCESS Step {finished.last_step}") == 2
    assert not [outcome for outcome in judge_many([layout.root], count=35, seed=2) if not outcome.is_found]


def test_a_resumed_run_samples_from_the_policy_of_its_commit(finished: Finished) -> None:
    events = list(read_events(finished.run.layout.events))
    resumed = [event for event in events if event.attempt == 3]
    assert {event.from_step for event in resumed if isinstance(event, Start)} == {finished.preempted_at}
    load = next(event for event in resumed if isinstance(event, Load))
    assert resumed.index(load) < resumed.index(next(event for event in resumed if isinstance(event, Dispatch)))
    published = {event.version: event.digest for event in events if isinstance(event, Publish)}
    assert (load.version, load.digest) == (finished.preempted_at, published[finished.preempted_at])


def test_a_run_learns(finished: Finished) -> None:
    lines = [json.loads(line) for line in (finished.run.layout.metrics / "orchestrator.jsonl").read_text().splitlines()]
    rewards = {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
    assert sum(rewards[step] for step in sorted(rewards)[-3:]) > sum(rewards[step] for step in (1, 2, 3)) + 0.1, rewards


def test_nobody_else_may_write_to_a_run_or_read_its_secrets(finished: Finished) -> None:
    """Check the files' modes under the umask that `Run` sets, and where the secrets of the configuration are."""
    layout = finished.run.layout
    modes = {path: path.stat().st_mode & 0o777 for path in (layout.root, *layout.root.rglob("*")) if not path.is_symlink()}
    assert not {path: oct(mode) for path, mode in modes.items() if mode & 0o022}
    assert modes[layout.configs / "orchestrator.toml"] == 0o600
    assert [path for path in modes if path.is_file() and PLANTED.encode() in path.read_bytes()] == [
        layout.configs / "orchestrator.toml"
    ]
    assert PLANTED not in finished.run.output
    assert PLANTED not in str(read_configs(layout))


def test_eval_scores_the_policies_of_a_run_as_the_run_did(
    finished: Finished, server: str, tiny_model: Path, tmp_path: Path
) -> None:
    layout, last, again = finished.run.layout, finished.last_step, RunLayout(tmp_path / "again")
    words = ["--client.base-url", f"{server}/v1", "--weights-dir", str(layout.weights), "--output-dir", str(again.root)]
    words += ["--num-examples", "5", "--sampling.max-tokens", "12", "--sampling.seed", "7", "--steps", str(last)]
    done = subprocess.run(
        [sys.executable, "-m", "trivet.evaluation.main", *words],
        env=os.environ | {"PYTHONPATH": str(ENVIRONMENTS)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    scores = {}
    for step, digest in ((0, make_start_manifest(tiny_model).digest), (last, verify(layout.weights_step(last)).digest)):
        summary, measured = (
            json.loads((root.evals_step(step, "vowels") / "summary.json").read_bytes()) for root in (again, layout)
        )
        assert summary["digest"] == measured["digest"] == digest
        # Sums on the CPU depend on which requests are computed together, and a last bit may choose another token.
        assert summary["avg"] == pytest.approx(measured["avg"], abs=0.05)
        scores[step] = summary["avg"]
    assert scores[last] > scores[0]


def test_the_page_shows_the_run(finished: Finished) -> None:
    command = [sys.executable, "-m", "trivet.cli.main", "view", str(finished.run.layout.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http\S+", process.stdout.readline())
        assert address is not None
        with httpx.Client(base_url=address[0], timeout=60) as client:
            assert "<script" in client.get("").text
            assert client.get("/api/steps").json() == [*range(1, finished.last_step + 1)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


def test_every_reload_serves_exactly_the_weights_of_its_directory(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with aclosing(open_client(inference_server + "/v1", timeout_s=240)) as client:
            start = make_start_manifest(tiny_model)
            assert await client.model_name() == str(tiny_model)
            assert (await client.served_policy()).digest == start.digest
            await assert_serves(client, tiny_model)
            layout = RunLayout(tmp_path)
            for version in (1, 2):
                manifest = publish_tiny_model(layout, version=version)
                status = await client.update_weights(layout.weights_step(version))
                assert (status.version, status.digest) == (version, manifest.digest)
                assert await client.served_policy() == status
                await assert_serves(client, layout.weights_step(version))
            assert (await client.reload_weights()).version == 0
            assert (await client.served_policy()).digest == start.digest
            await assert_serves(client, tiny_model)

    asyncio.run(scenario())


def test_a_completion_that_spans_an_update_carries_both_versions(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    publish_tiny_model(layout, version=1)

    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=480)) as client, asyncio.TaskGroup() as tasks:
            spanning = tasks.create_task(chat(inference_server, max_tokens=900, ignore_eos=True, n=2), name="spanning")
            async with busy(inference_server):
                await client.update_weights(layout.weights_step(1))
                fresh = await chat(inference_server, max_tokens=8)
        old, new = Oracle(tiny_model), Oracle(layout.weights_step(1))
        prompt = spanning.result()["prompt_token_ids"]
        for choice in spanning.result()["choices"]:
            runs = choice["policy_versions"]
            assert [version for version, _ in runs] == [0, 1]
            assert sum(length for _, length in runs) == len(choice["token_ids"]) == 900
            switch = runs[0][1]
            # Up to the switch every log-probability is the old policy's, and the first after it is not.
            expected = old.logprobs(prompt, choice["token_ids"], temperature=1.0)
            sampled = [token["logprob"] for token in choice["logprobs"]["content"]]
            assert sampled[:switch] == pytest.approx(expected[:switch], abs=1e-4)
            assert sampled[switch] != pytest.approx(expected[switch], abs=1e-4)
        choice = fresh["choices"][0]
        expected = new.logprobs(fresh["prompt_token_ids"], choice["token_ids"], temperature=1.0)
        assert [token["logprob"] for token in choice["logprobs"]["content"]] == pytest.approx(expected, abs=1e-4)
        assert choice["policy_versions"] == [[1, len(choice["token_ids"])]]

    asyncio.run(scenario())


def test_a_published_adapter_answers_for_the_policy_and_takes_the_place_of_the_one_before(
    inference_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)

    async def scenario() -> None:
        async with aclosing(open_client(inference_server, timeout_s=240)) as client:
            await assert_serves(client, tiny_model)
            for version in (1, 2, 3):
                manifest = publish_adapter(layout, base=tiny_model, version=version)
                status = await client.update_weights(layout.weights_step(version))
                assert (status.version, status.digest) == (version, manifest.digest)
                assert await client.served_policy() == status
                merged = write_merged(tmp_path / f"merged_{version}", adapter=layout.weights_step(version), base=tiny_model)
                await assert_serves(client, merged)
            assert (await client.reload_weights()).digest == make_start_manifest(tiny_model).digest
            await assert_serves(client, tiny_model)

    asyncio.run(scenario())
