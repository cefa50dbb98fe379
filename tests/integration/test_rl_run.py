"""The whole loop with the real vLLM: launcher, inference server, orchestrator and trainer on the tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.history import assert_exactly_once, read_history
from trivet.config.layout import COMMITTED, STABLE, RunLayout
from trivet.telemetry.events import read_events
from trivet.wire.events import BatchFormed, Dispatch, Load, Publish, Start

pytestmark = pytest.mark.vllm

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments"
MAX_STEPS = 12

CONFIG = """
max_steps = {max_steps}
seq_len = 256
max_model_len = 256
output_dir = "{output_dir}"

[model]
name = "{model}"

[ckpt]
interval = 6

[trainer.model]
compute_dtype = "float32"

[trainer.optim]
lr = 1e-2

[orchestrator]
batch_size = 16
rollouts_per_example = 4
oversampling_factor = 2.0

[orchestrator.sampling]
max_tokens = 12

[[orchestrator.env]]
id = "vowels"

[inference]
max_num_seqs = 32
cpu_kv_cache_gib = 0.25

[inference.model]
dtype = "float32"
enforce_eager = true
"""


class Run:
    """`rl` as a user starts it."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.layout = RunLayout(directory / "outputs")
        self._config = directory / "rl.toml"
        self._config.write_text(CONFIG.format(max_steps=MAX_STEPS, output_dir=self.layout.root, model=model))
        self._log = directory / "rl.out"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": str(ENVIRONMENTS), "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "trivet.launcher.rl", "@", str(self._config), *flags]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        return self.process

    @property
    def output(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[Run]:
    run = Run(tmp_path, tiny_model)
    yield run
    run.stop()


def wait_for(path: Path, run: Run, *, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert run.process is not None
        assert run.process.poll() is None, run.output[-4000:]
        assert time.monotonic() < deadline, run.output[-4000:]
        time.sleep(0.1)


def test_a_run_learns_is_interrupted_and_resumes_without_losing_or_repeating_a_group(run: Run) -> None:
    run.start()
    wait_for(run.layout.checkpoint_step(6) / COMMITTED, run)
    wait_for(run.layout.weights_step(7) / STABLE, run)
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130, run.output[-4000:]

    assert run.start("--ckpt.resume-step", "-1").wait(300) == 0, run.output[-4000:]

    history = assert_exactly_once(run.layout.events, max_steps=MAX_STEPS)
    first = read_history_of_batches(run.layout, up_to=6)
    assert {step: history.batches[step] for step in range(1, 7)} == first
    assert_policy_served_before_first_rollout(run.layout, version=6)
    rewards = [reward_of(run.layout, step) for step in range(1, MAX_STEPS + 1)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert {path.name for path in run.layout.configs.iterdir()} == {"inference.toml", "orchestrator.toml", "trainer.toml"}
    assert run.output.count("SUCCESS Step 12") == 2


def read_history_of_batches(layout: RunLayout, *, up_to: int) -> dict[int, list[int]]:
    batches: dict[int, list[int]] = {}
    for event in read_events(layout.events):
        if isinstance(event, BatchFormed) and event.attempt == 1 and event.step <= up_to:
            batches[event.step] = event.group_ids
    return batches


def assert_policy_served_before_first_rollout(layout: RunLayout, *, version: int) -> None:
    resumed = [event for event in read_events(layout.events) if event.attempt == 2]
    start = next(event for event in resumed if isinstance(event, Start) and event.role == "orchestrator")
    assert start.from_step == version
    load = next(event for event in resumed if isinstance(event, Load))
    dispatch = next(event for event in resumed if isinstance(event, Dispatch))
    assert load.version == version
    assert resumed.index(load) < resumed.index(dispatch)
    published = {event.version: event.digest for event in read_history(layout.events).order if isinstance(event, Publish)}
    assert published[version] == load.digest


def reward_of(layout: RunLayout, step: int) -> float:
    lines = map(json.loads, (layout.metrics / "orchestrator.jsonl").read_text().splitlines())
    return [values["reward/mean"] for values in lines if values["step"] == step][-1]
