"""The JobSet that `[kubernetes]` writes runs in namespaces of this machine: exit codes, policies, an eviction and a resume."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.histories import assert_proven
from support.manifest_runner import ManifestRunner, run_manifest
from support.nodes import can_make_nodes
from support.processes import descendants_with, wait_until
from support.rl_run import CONFIG, ENVIRONMENTS
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.wire.events import Stop

pytestmark = pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")

START_S = 300.0
MAX_STEPS = 400
"""More than any machine takes before it is told to end."""
NODES = """
[deployment]
type = "multi_node"
gpus_per_node = 0
lost_after_s = 10

[recovery]
preemption_grace_s = 20
"""
KUBERNETES = """
[kubernetes]
image = "registry.example/trivet:1"
volume_claim = "runs"
volume_path = "/mnt/runs"
python = "{python}"
gpus_per_node = 0
max_restarts = 2
max_server_restarts = 1
shm_size = "1Gi"
secret_env = {{ CODE_WORD = "words/first" }}

[kubernetes.env]
PYTHONPATH = "{path}"
WANDB_MODE = "disabled"
HF_HUB_OFFLINE = "1"
"""


def write_manifest(directory: Path, text: str) -> list[dict[str, Any]]:
    """Have `rl` write the manifest of a configuration; return its documents."""
    file = directory / "rl.toml"
    path = os.pathsep.join([str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    file.write_text(text + NODES + KUBERNETES.format(python=sys.executable, path=path))
    command = [sys.executable, "-m", "trivet.launcher.commands.rl", "@", str(file)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all((directory / "run" / "kubernetes" / "jobset.yaml").read_text()))


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
    # One second: bash as the first process of a pod heeds no SIGTERM.
    overrides = f"[kubernetes.pod_overrides]\nterminationGracePeriodSeconds = 1\ncontainers = [{container}]\n"
    documents = write_manifest(directory, text + overrides)
    secrets = {"words": {"first": "abracadabra"}}
    with run_manifest(documents, directory=directory / "pods", claims={"runs": volume}, secret_values=secrets) as runner:
        await_that(runner, lambda: runner.outcome is not None and not runner.num_running, "the end", timeout_s=60)
        return runner


@pytest.mark.parametrize(
    ("code", "restarts", "outcome"), [(0, 0, "Completed"), (2, 0, "Failed"), (3, 0, "Failed"), (75, 2, "Failed")]
)
def test_the_exit_code_of_the_first_pod_decides_about_all(tmp_path: Path, code: int, restarts: int, outcome: str) -> None:
    runner = play(tmp_path, f"[[ $JOBSET_NODE_BASE == 0 ]] || exec sleep 60\nexit {code}")
    assert (runner.outcome, runner.restarts) == (outcome, restarts)
    assert runner.ended == [("trainer-0-0", code)] * (restarts + 1)


def test_a_server_is_replaced_alone_until_it_failed_too_often(tmp_path: Path) -> None:
    """It fails three times: the first loss costs a pod, the second, above max_server_restarts, a restart of all."""
    script = """
    num_tries() { wc -l < tries; }
    if [[ $JOBSET_NODE_BASE == 0 ]]; then
      until [[ -e tries ]] && ((`num_tries` == 4)); do sleep 0.1; done
      exit 0
    fi
    echo x >> tries
    ((`num_tries` == 4)) || exit 1
    exec sleep 60
    """
    runner = play(tmp_path, script)
    assert (runner.outcome, runner.restarts) == ("Completed", 1)
    assert runner.ended == [*[("inference-0-0", 1)] * 3, ("trainer-0-0", 0)]


def test_a_pod_finds_names_files_and_secrets_as_the_manifest_says(tmp_path: Path) -> None:
    script = """
    grep -q rollouts_per_example /run/trivet/rl.toml
    if touch /run/trivet/x 2> /dev/null; then exit 4; fi
    [[ $PWD == /mnt/runs && $CODE_WORD == abracadabra ]]
    [[ $HOSTNAME == trivet-*-0-0 && `hostname` == "$HOSTNAME" ]]
    echo "$JOBSET_NODE_BASE $JOBSET_JOB_INDEX $JOB_COMPLETION_INDEX $JOBSET_RESTARTS $JOBSET_NODES" > "node.$HOSTNAME"
    until getent hosts "$JOBSET_HEAD" > "head.$HOSTNAME" && getent hosts trivet-inference-0-0.trivet > /dev/null; do sleep 0.1; done
    until [[ -e node.trivet-trainer-0-0 && -e node.trivet-inference-0-0 ]]; do sleep 0.1; done
    """
    runner = play(tmp_path, script)
    assert runner.outcome == "Completed", runner.output()
    volume = tmp_path / "volume"
    assert (volume / "node.trivet-trainer-0-0").read_text() == "0 0 0 0 2\n"
    assert (volume / "node.trivet-inference-0-0").read_text() == "1 0 0 0 2\n"
    assert (volume / "head.trivet-inference-0-0").read_text().split() == ["10.214.0.1", "trivet-trainer-0-0.trivet"]


@pytest.mark.vllm
def test_a_run_that_is_evicted_commits_and_goes_on_in_new_pods(tmp_path: Path, tiny_model: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    layout = RunLayout(volume / "run")
    # An interval that is never reached: the only commits are the one that the eviction asks for, and the last.
    text = CONFIG.replace("interval = 6", "interval = 10000").format(max_steps=MAX_STEPS, output_dir="run", model=tiny_model)
    documents = write_manifest(tmp_path, "shutdown_timeout_s = 10\n" + text)
    secrets = {"words": {"first": "abracadabra"}}
    with run_manifest(documents, directory=tmp_path / "pods", claims={"runs": volume}, secret_values=secrets) as runner:
        await_that(runner, layout.weights_step(4).exists, "step 4")
        head = runner.pod("trainer-0-0")
        head.terminate()
        await_that(runner, lambda: runner.restarts == 1, "the restart", timeout_s=60)
        assert ("trainer-0-0", 143) in runner.ended
        (reached,) = committed_steps(layout)
        assert 0 < reached < MAX_STEPS
        await_that(runner, lambda: runner.outcome is not None and not runner.num_running, "the end")
        assert (runner.outcome, runner.restarts) == ("Completed", 1), runner.output()
    assert any(event.reason == "preempted" for event in read_events(layout.events) if isinstance(event, Stop))
    report = assert_proven(check_run(layout))
    assert (report.last_step, report.starts) == (MAX_STEPS, {"orchestrator": 2, "trainer": 2})
    assert not descendants_with("trivet", os.getpid()), "something of the run is left"
