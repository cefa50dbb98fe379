"""Submit to a real SLURM cluster in namespaces of this machine: time limit, commit, requeue, resume, lost nodes and end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from support.histories import assert_proven
from support.processes import descendants_with, wait_until
from support.rl_run import CONFIG, ENVIRONMENTS
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.wire.events import ServerUp, Stop, Train

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs Debian's slurm-wlm and munge"),
]
SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_cluster.sh"
MAX_STEPS = 1_000_000
"""More than any machine takes before it is told to end."""
SLURM = """
[slurm]
time = "60"
gpus_per_node = 0
signal_seconds = 60

[recovery]
preemption_grace_s = 20
"""
"""A limit above what any machine takes to make steps; the test lowers it then."""

START_S = 900.0
"""SLURM alone waits two minutes before it starts a job that was queued again."""
NODES = {
    1: "",
    2: """
[deployment]
type = "multi_node"
gpus_per_node = 0
lost_after_s = 10
""",
}
"""The nodes of a job: all roles on one, or the trainer on one and the server on the other, with Ray."""

THREE_NODES = """
[deployment]
type = "multi_node"
num_infer_replicas = 2
gpus_per_node = 0
lost_after_s = 10
"""
"""The trainer on one of three nodes, a server on each of the others."""

Cluster = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cluster_directory() -> Iterator[Path]:
    """A directory with a short path: SLURM makes sockets in it."""
    with tempfile.TemporaryDirectory(prefix="trivet-") as directory:
        yield Path(directory) / "cluster"


@pytest.fixture
def cluster(cluster_directory: Path, num_cluster_nodes: int) -> Iterator[Cluster]:
    environment = os.environ | {
        "SLURM_CLUSTER_DIR": str(cluster_directory),
        "PYTHONPATH": os.pathsep.join([str(ENVIRONMENTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WANDB_MODE": "disabled",
    }

    def call(*words: object, is_checked: bool = True) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            ["bash", SCRIPT, *map(str, words)], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 or not is_checked, done.stdout + done.stderr
        return done

    call("up", num_cluster_nodes)
    yield call
    call("down")
    assert not cluster_directory.exists()


@pytest.fixture
def num_cluster_nodes() -> int:
    return 2


def property_of(cluster: Cluster, job: str, name: str) -> str:
    found = cluster("run", "scontrol", "show", "job", job).stdout
    return next(word.partition("=")[2] for word in found.split() if word.startswith(f"{name}="))


def num_steps(layout: RunLayout) -> int:
    """Return the steps that the run has taken, repeated ones included."""
    return sum(isinstance(event, Train) for event in read_events(layout.events)) if layout.events.exists() else 0


def lose(cluster: Cluster, directory: Path, node: int) -> None:
    """Set a node's link down and kill its processes, except the one that holds its namespaces."""
    holder = int((directory / f"node{node}.pid").read_text())
    network = Path(f"/proc/{holder}/ns/net").readlink()
    cluster("node", node, "ip", "link", "set", "eth0", "down")

    def kill_all() -> bool:
        """Return whether there was nothing to kill."""
        found = [pid for pid in psutil.pids() if pid != holder and _network(pid) == network]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_until(kill_all, timeout_s=20, waiting_for=f"the end of node {node}")


def _network(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink()
    except OSError:  # it has ended
        return None


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_run_is_queued_again_at_its_time_limit_and_finishes(
    tmp_path: Path, tiny_model: Path, cluster: Cluster, num_nodes: int
) -> None:
    layout, file = RunLayout(tmp_path / "run"), tmp_path / "rl.toml"
    # An interval that is never reached: the only commit is the one that the signal asks for.
    text = CONFIG.replace("interval = 6", "interval = 10000") + SLURM + NODES[num_nodes]
    file.write_text("shutdown_timeout_s = 10\n" + text.format(max_steps=MAX_STEPS, output_dir=layout.root, model=tiny_model))
    said = cluster("run", sys.executable, "-m", "trivet.launcher.commands.rl", "@", file).stdout
    job = said.split()[1]

    log = layout.slurm / f"{job}.log"
    wait_until(lambda: num_steps(layout) > 4, timeout_s=START_S, waiting_for=f"steps: {log}")
    # SLURM counts limits in minutes. It kills a job at the end of the minute in which its time was up.
    run_time = property_of(cluster, job, "RunTime").split(":")
    cluster("run", "scontrol", "update", f"JobId={job}", f"TimeLimit={int(run_time[1]) + 3}")
    wait_until(
        lambda: property_of(cluster, job, "JobState") == "PENDING" and committed_steps(layout) != [],
        timeout_s=START_S,
        waiting_for=f"a requeue: {log}",
    )
    reached = committed_steps(layout)[-1]
    assert 0 < reached < MAX_STEPS, log.read_text()
    preempted = [event for event in read_events(layout.events) if isinstance(event, Stop)]
    assert any(event.reason == "preempted" for event in preempted), preempted
    assert not descendants_with(str(layout.root), 1), "something of the job is left"
    # The second start is to finish: a smaller goal, and all the time it needs.
    (resolved,) = layout.slurm.glob("rl-*.toml")
    resolved.write_text(resolved.read_text().replace(f"max_steps = {MAX_STEPS}", f"max_steps = {reached + 5}"))
    cluster("run", "scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_until(
        lambda: property_of(cluster, job, "JobState") == "COMPLETED",
        timeout_s=START_S,
        waiting_for=f"the end of the job: {log}",
    )
    assert property_of(cluster, job, "NumNodes") == str(num_nodes)
    report = assert_proven(check_run(layout))
    assert (report.last_step, report.starts) == (reached + 5, {"orchestrator": 2, "trainer": 2})
    assert cluster("run", "squeue", "--noheader").stdout == ""
    assert list(layout.slurm.glob("*.pid")) == []


def test_a_run_that_is_cancelled_ends_and_is_not_queued_again(tmp_path: Path, tiny_model: Path, cluster: Cluster) -> None:
    layout, file = RunLayout(tmp_path / "run"), tmp_path / "rl.toml"
    text = CONFIG.format(max_steps=MAX_STEPS, output_dir=layout.root, model=tiny_model)
    file.write_text(text + "[slurm]\ntime = '10'\ngpus_per_node = 0\n")
    job = cluster("run", sys.executable, "-m", "trivet.launcher.commands.rl", "@", file).stdout.split()[1]
    wait_until(lambda: layout.weights_step(1).exists(), timeout_s=START_S, waiting_for="the first step")
    cluster("run", "scancel", job)
    wait_until(lambda: cluster("run", "squeue", "--noheader").stdout == "", timeout_s=60, waiting_for="the end of the job")
    assert property_of(cluster, job, "JobState") == "CANCELLED"
    assert property_of(cluster, job, "Restarts") == "0"
    assert not descendants_with(str(layout.root), 1)


@pytest.mark.parametrize("num_cluster_nodes", [3])
def test_a_job_goes_on_without_a_lost_node_and_is_queued_again_when_its_first_is_lost(
    tmp_path: Path, tiny_model: Path, cluster: Cluster, cluster_directory: Path
) -> None:
    layout, file = RunLayout(tmp_path / "run"), tmp_path / "rl.toml"
    text = CONFIG.format(max_steps=MAX_STEPS, output_dir=layout.root, model=tiny_model)
    file.write_text(text + THREE_NODES + "[slurm]\ntime = '20'\ngpus_per_node = 0\n")
    job = cluster("run", sys.executable, "-m", "trivet.launcher.commands.rl", "@", file).stdout.split()[1]
    log = layout.slurm / f"{job}.log"

    def admitted() -> set[str]:
        found = list(read_events(layout.events)) if layout.events.exists() else []
        return {event.server for event in found if isinstance(event, ServerUp)}

    wait_until(lambda: len(admitted()) == 2 and num_steps(layout) > 2, timeout_s=START_S, waiting_for=f"two servers: {log}")
    lose(cluster, cluster_directory, 3)
    wait_until(
        lambda: "node3" in cluster("run", "sinfo", "--noheader", "--states=down", "--Node", "--format=%N").stdout,
        timeout_s=120,
        waiting_for="SLURM to notice the lost node",
    )
    before = num_steps(layout)
    wait_until(lambda: num_steps(layout) > before + 5, timeout_s=120, waiting_for=f"steps without the lost node: {log}")
    assert property_of(cluster, job, "JobState") == "RUNNING"
    lose(cluster, cluster_directory, 1)
    wait_until(lambda: property_of(cluster, job, "JobState") == "PENDING", timeout_s=180, waiting_for=f"a requeue: {log}")
    assert property_of(cluster, job, "Restarts") == "1"
    wait_until(lambda: not descendants_with(str(layout.root), 1), timeout_s=90, waiting_for="the end of the second node")
    assert_proven(check_run(layout))
    cluster("run", "scancel", job)
