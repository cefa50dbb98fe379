"""The Job and the RayJob that `[kubernetes]` writes run in namespaces of this machine: exit codes, evictions and resumes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster_run import MODULES
from support.histories import assert_proven
from support.manifest_runner import ManifestRunner, run_manifest
from support.nodes import can_make_nodes
from support.processes import descendants_with, wait_until
from support.rl_run import CONFIG, ENVIRONMENTS
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.wire.events import ServerUp, Stop, Train

pytestmark = pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")

START_S = 420.0
MAX_STEPS = 1_000_000
"""More than any machine takes before it is told to end."""
RARELY = CONFIG.replace("interval = 6", "interval = 10000")
"""An interval that is never reached: the only commits are the one that the eviction asks for, and the last."""
NODES = """
[deployment]
type = "multi_node"
gpus_per_node = 0
lost_after_s = 10
"""
KUBERNETES = """
[recovery]
preemption_grace_s = 30

[kubernetes]
image = "registry.example/trivet:1"
volume_claim = "runs"
volume_path = "/mnt/runs"
python = "{python}"
gpus_per_node = 0
max_restarts = 2
shm_size = "1Gi"
secret_env = {{ CODE_WORD = "words/first" }}

[kubernetes.env]
PYTHONPATH = "{path}"
WANDB_MODE = "disabled"
HF_HUB_OFFLINE = "1"
"""
SECRETS = {"words": {"first": "abracadabra"}}


def write_manifest(directory: Path, text: str, *, kind: str = "job") -> list[dict[str, Any]]:
    """Have `rl` write the manifest of a configuration; return its documents."""
    file = directory / "rl.toml"
    path = os.pathsep.join([str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    file.write_text("shutdown_timeout_s = 10\n" + text + KUBERNETES.format(python=sys.executable, path=path))
    command = [sys.executable, "-m", "trivet.launcher.commands.rl", "@", str(file)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all((directory / "run" / "kubernetes" / f"{kind}.yaml").read_text()))


def await_that(runner: ManifestRunner, condition: Callable[[], object], what: str, *, timeout_s: float = START_S) -> None:
    """Let the cluster work until `condition` holds."""

    def step() -> bool:
        runner.tick()
        return bool(condition())

    try:
        wait_until(step, timeout_s=timeout_s, waiting_for=what)
    except AssertionError as exc:
        raise AssertionError(f"{exc}; ended: {runner.ended}: {runner.output()}") from None


def play(directory: Path, script: str) -> ManifestRunner:
    """Carry out a manifest in whose pods bash plays trivet; return how it went."""
    volume = directory / "volume"
    volume.mkdir()
    text = CONFIG.format(max_steps=1, output_dir="run", model="none")
    container = f'{{ name = "trivet", command = ["bash", "-euc", {json.dumps(script)}] }}'
    documents = write_manifest(directory, f"{text}[kubernetes.pod_overrides]\ncontainers = [{container}]\n")
    with run_manifest(
        documents, directory=directory / "pods", claims={"runs": volume}, secret_values=SECRETS, num_slots=3
    ) as runner:
        await_that(runner, runner.tick, "the end", timeout_s=60)
        return runner


@pytest.mark.parametrize(
    ("code", "restarts", "outcome"), [(0, 0, "Completed"), (2, 0, "Failed"), (3, 0, "Failed"), (75, 2, "Failed")]
)
def test_the_exit_code_of_the_pod_decides_whether_another_is_made(
    tmp_path: Path, code: int, restarts: int, outcome: str
) -> None:
    runner = play(tmp_path, f"exit {code}")
    assert (runner.outcome, runner.restarts) == (outcome, restarts)
    assert runner.ended == [("job", code)] * (restarts + 1)


def test_a_pod_finds_files_and_secrets_as_the_manifest_says(tmp_path: Path) -> None:
    script = """
    grep -q rollouts_per_example /run/trivet/rl.toml
    if touch /run/trivet/x 2> /dev/null; then exit 4; fi
    [[ $PWD == /mnt/runs && $CODE_WORD == abracadabra && -n $JOB_UID ]]
    touch here
    """
    runner = play(tmp_path, script)
    assert runner.outcome == "Completed", runner.output()
    assert (tmp_path / "volume" / "here").exists()


def finish(runner: ManifestRunner, layout: RunLayout, directory: Path) -> None:
    """Check that the run has committed what it was told to, and have the next start go on from there for five steps only."""
    (reached,) = committed_steps(layout)
    assert 0 < reached < MAX_STEPS
    assert any(event.reason == "preempted" for event in read_events(layout.events) if isinstance(event, Stop))
    (file,) = (directory / "pods" / "config_maps").glob("*/rl.toml")
    file.write_text(file.read_text().replace(f"max_steps = {MAX_STEPS}", f"max_steps = {reached + 5}"))
    await_that(runner, lambda: runner.tick() is not None, "the end")
    assert (runner.outcome, runner.restarts) == ("Completed", 1), runner.output()
    report = assert_proven(check_run(layout))
    assert (report.last_step, report.starts) == (reached + 5, {"orchestrator": 2, "trainer": 2})


@pytest.mark.vllm
def test_a_run_whose_pod_is_evicted_commits_and_goes_on_in_a_new_one(tmp_path: Path, tiny_model: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    layout = RunLayout(volume / "run")
    documents = write_manifest(tmp_path, RARELY.format(max_steps=MAX_STEPS, output_dir="run", model=tiny_model))
    with run_manifest(
        documents, directory=tmp_path / "pods", claims={"runs": volume}, secret_values=SECRETS, num_slots=2
    ) as runner:
        await_that(runner, layout.weights_step(4).exists, "step 4")
        runner.pod("job").terminate()
        await_that(runner, lambda: runner.restarts == 1, "the restart", timeout_s=120)
        assert runner.ended == [("job", 143)]
        finish(runner, layout, tmp_path)


@pytest.mark.vllm
def test_a_ray_job_outlives_a_lost_pod_and_commits_when_its_head_is_evicted(tmp_path: Path, tiny_model: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    layout = RunLayout(volume / "run")
    text = RARELY.format(max_steps=MAX_STEPS, output_dir="run", model=tiny_model)
    documents = write_manifest(tmp_path, text + NODES, kind="rayjob")

    def num(kind: type[ServerUp | Train]) -> int:
        return sum(isinstance(event, kind) for event in read_events(layout.events)) if layout.events.exists() else 0

    with run_manifest(
        documents, directory=tmp_path / "pods", claims={"runs": volume}, secret_values=SECRETS, num_slots=9
    ) as runner:
        await_that(runner, lambda: num(Train) > 4, "steps")
        servers = num(ServerUp)
        serving = runner.pod_with(MODULES["inference"])
        serving.terminate()
        await_that(runner, lambda: num(ServerUp) > servers, "a server in a new pod")
        steps = num(Train)
        await_that(runner, lambda: num(Train) > steps + 4, "steps with it")
        assert [name for name, _ in runner.ended] == [serving.name]
        assert committed_steps(layout) == []
        runner.pod("head").terminate()
        await_that(runner, lambda: runner.restarts == 1, "the failure of the job", timeout_s=120)
        finish(runner, layout, tmp_path)
    assert not descendants_with("trivet", os.getpid()), "something of the run is left"
