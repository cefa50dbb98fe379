"""Run the whole loop with the real vLLM: launcher, inference server, orchestrator and trainer on the tiny model."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.histories import assert_proven
from support.mutations import judge_many
from support.processes import assert_all_gone, assert_port_free, descendants_of
from support.rl_run import CONFIG, Run
from trivet.config.layout import COMMITTED, STABLE, RunLayout
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.weights.manifest import read_manifest
from trivet.wire.events import BatchFormed, Dispatch, Load, Publish, Start
from trivet.wire.rollouts import GroupId
from trivet.wire.versions import Step

pytestmark = pytest.mark.vllm

MAX_STEPS = 12
EVALS = """
[orchestrator.eval]
interval = 5
num_examples = 6
sampling = {{ max_tokens = 12, seed = 1 }}
env = [{{ id = "vowels" }}]

[orchestrator.val]
interval = 4
num_examples = 6
"""


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[Run]:
    run = Run(tmp_path, tiny_model, max_steps=MAX_STEPS, template=CONFIG + EVALS)
    yield run
    run.stop()


def test_a_run_learns_is_interrupted_and_resumes_without_losing_or_repeating_a_group(run: Run) -> None:
    run.start()
    run.wait_for(run.layout.checkpoint_step(6) / COMMITTED)
    run.wait_for(run.layout.weights_step(7) / STABLE)
    assert Path(run.layout.scratch_note.read_text().strip()).stat().st_mode & 0o777 == 0o700
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.await_exit(240) == 130, run.output[-4000:]

    run.start("--ckpt.resume-step", "-1")
    assert run.await_exit() == 0, run.output[-4000:]

    report = assert_proven(check_run(run.layout))
    assert (report.last_step, report.starts) == (MAX_STEPS, {"orchestrator": 2, "trainer": 2})
    assert read_batches(run.layout, up_to=6) == read_batches(run.layout, up_to=6, attempt=1)
    assert_policy_served_before_first_rollout(run.layout, version=6)
    rewards = [reward_of(run.layout, step) for step in range(1, MAX_STEPS + 1)]
    # Which policy samples what depends on the time that each role takes, so the gain differs: 0.25 was seen on a busy machine.
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1, rewards
    assert {path.name for path in run.layout.configs.iterdir()} == {"inference.toml", "orchestrator.toml", "trainer.toml"}
    assert run.output.count("SUCCESS Step 12") == 2
    assert_nobody_else_may_write(run.layout)
    assert_evaluated(run.layout)
    missed = [outcome for outcome in judge_many([run.layout.root], count=70, seed=2) if not outcome.is_found]
    assert len(missed) <= 1, missed


def assert_nobody_else_may_write(layout: RunLayout) -> None:
    """Check the files' modes under the umask that `Run` sets; others may not even read the secret."""
    modes = {path: path.stat().st_mode & 0o777 for path in (layout.root, *layout.root.rglob("*")) if not path.is_symlink()}
    assert not {path: oct(mode) for path, mode in modes.items() if mode & 0o022}
    assert modes[layout.secret] == 0o600


def assert_evaluated(layout: RunLayout) -> None:
    """Check the evaluations: the base model, each multiple of 5 that was reached or passed, and the last policy, which must
    score more."""
    scores = {
        int(path.parts[-3].removeprefix("step_")): json.loads(path.read_text())
        for path in layout.evals.glob("*/vowels/summary.json")
    }
    assert scores.keys() >= {0, MAX_STEPS}
    assert len([step for step in scores if 5 <= step < 10]) == 1
    assert scores[MAX_STEPS]["avg"] > scores[0]["avg"]
    for step, summary in scores.items():
        assert (summary["num_failed"], summary["num_examples"]) == (0, 6)
        if step and layout.weights_step(step).exists():
            assert summary["digest"] == read_manifest(layout.weights_step(step)).digest
    logged = read_metrics(layout, "eval")
    assert sorted(line["step"] for line in logged if "eval/vowels/avg@1" in line) == sorted(scores)
    # A validation that ends after the last step is listed with the evaluations.
    assert any("val_reward/mean" in line for line in (*read_metrics(layout, "orchestrator"), *logged))


def read_batches(layout: RunLayout, *, up_to: int, attempt: int | None = None) -> dict[Step, list[GroupId]]:
    """Return groups by step, as they were formed last."""
    return {
        event.step: event.group_ids
        for event in read_events(layout.events)
        if isinstance(event, BatchFormed) and event.step <= up_to and attempt in (None, event.attempt)
    }


def assert_policy_served_before_first_rollout(layout: RunLayout, *, version: int) -> None:
    resumed = [event for event in read_events(layout.events) if event.attempt == 2]
    start = next(event for event in resumed if isinstance(event, Start) and event.role == "orchestrator")
    assert start.from_step == version
    load = next(event for event in resumed if isinstance(event, Load))
    dispatch = next(event for event in resumed if isinstance(event, Dispatch))
    assert load.version == version
    assert resumed.index(load) < resumed.index(dispatch)
    published = {event.version: event.digest for event in read_events(layout.events) if isinstance(event, Publish)}
    assert published[version] == load.digest


def read_metrics(layout: RunLayout, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (layout.metrics / f"{name}.jsonl").read_text().splitlines()]


def reward_of(layout: RunLayout, step: int) -> float:
    return [values["reward/mean"] for values in read_metrics(layout, "orchestrator") if values["step"] == step][-1]


@pytest.mark.slow
def test_a_killed_launcher_takes_every_role_with_it(run: Run) -> None:
    launcher = run.start()
    run.wait_for(run.layout.weights_step(1) / STABLE)
    family = descendants_of(launcher.pid)
    port = int(run.output.split("inference ready url=http://127.0.0.1:")[1].split("/")[0])
    launcher.kill()
    assert launcher.wait(120) == -signal.SIGKILL
    assert_all_gone(family, timeout_s=60.0)
    assert_port_free(port)
