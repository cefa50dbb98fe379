"""A run whose server and environments are on machines without any directory of the run: real Ray and roles in namespaces."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster_run import ENVIRON, START_S, ClusterRun, prove
from support.nodes import can_make_nodes
from support.ray_nodes import RayNodes, make_ray_nodes
from trivet.checkpoints.run_record import read_run
from trivet.config.layout import SECRET_FILE
from trivet.process.lifetime import module_command

TRAINS, SERVES, PLAYS = 0, 1, 2
"""The machines: the first one has the directory of the run, and drives it too."""
PLAYING = "num_env_nodes = 1\nenv_cpus_per_node = 1\nenv_resources = { sandbox = 1 }\n"
SERVER = "trivet.inference.main"
KEYS = '\n[weights]\ntransport = "http"\n'
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")]


def test_machines_without_the_directory_serve_a_run_that_is_killed_once_on_each_side(tmp_path: Path, tiny_model: Path) -> None:
    directory, of_ray = tmp_path / "run", tmp_path / "ray"
    directory.mkdir()
    of_ray.mkdir()
    with make_ray_nodes(3, directory=of_ray) as nodes:
        for machine in (SERVES, PLAYS):
            hide(nodes, machine, directory, log=of_ray / "mount.out")
        run = ClusterRun(directory, tiny_model, nodes, max_steps=100_000, keys=PLAYING)
        run.add_keys(KEYS)
        nodes.start_head(num_cpus=1, environ=ENVIRON)
        run.join(SERVES)
        nodes.join(PLAYS, resources={"sandbox": 1}, environ=ENVIRON)
        driver = run.start()
        run.await_step(3)
        assert nodes.find(TRAINS, "trivet.trainer.main")
        server = nodes.find(SERVES, SERVER)
        assert not list(Path(f"/proc/{server}/root{directory}").iterdir())
        assert_secret_is_kept(run, nodes, server)
        status = command("status", run)
        assert run.machines_of("env-workers") == [PLAYS]
        assert "env-workers-2 (node 2) alive" in status, status
        assert "inference (node 1) alive, serving" in status, status

        os.kill(server, signal.SIGKILL)
        run.await_that(lambda: "inference restarted, back after" in command("status", run), "the server's return")
        run.await_step(num_steps(run) + 8)  # with the server that came back
        os.killpg(driver.pid, signal.SIGKILL)
        roles = ("inference", "env-workers")
        run.await_that(lambda: not any(map(run.machines_of, roles)), "the end of the processes of other machines")
        resumed = run.start("--ckpt.resume-step", "-1", "--max-steps", str(num_steps(run) + 6))
        assert resumed.wait(START_S) == 0, run.everything()

        assert_secret_is_kept(run, nodes, None)
    record = read_run(run.layout)
    assert record is not None
    assert record.attempt == 2
    prove(run.layout)
    lines = run.layout.log_file("inference.stdout").read_text().splitlines()
    loaded = [line for line in lines if "policy loaded version=" in line]
    assert len(loaded) > 10, lines
    assert len(loaded) == len(set(loaded))  # with their seconds: none is there twice
    started = [run.layout.log_file(f"node_{node}.log").read_text().count(" rl started ") for node in (1, 2)]
    assert started == [3, 2]
    assert "environment loaded env=vowels" in run.layout.env_worker_log("vowels@2").read_text()


def hide(nodes: RayNodes, machine: int, directory: Path, *, log: Path) -> None:
    """Let a machine see an empty directory in place of another."""
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(directory)]
    assert nodes.start(machine, mount, log=log, environ=os.environ).wait(20) == 0, log.read_text()


def num_steps(run: ClusterRun) -> int:
    return max(int(step) for step in re.findall(r"trainer SUCCESS Step (\d+) ", run.output()))


def command(name: str, run: ClusterRun) -> str:
    words = module_command("trivet.cli.main", name, str(run.layout.root), python=sys.executable)
    return subprocess.run(words, capture_output=True, text=True, env=ENVIRON, check=True).stdout


def assert_secret_is_kept(run: ClusterRun, nodes: RayNodes, server: int | None) -> None:
    """Check that the secret is in no argument, no log and no file of Ray, and that the server's copy is for its owner alone."""
    secret = run.layout.secret.read_bytes().strip()
    places = [run.layout.logs, *(nodes.root(machine) / nodes.temporary.relative_to("/") for machine in range(nodes.count))]
    files = [path for place in places for path in place.rglob("*") if path.is_file() and path.name != run.layout.secret.name]
    assert len(files) > 10
    assert [path for path in files if secret in path.read_bytes()] == []
    for machine in range(nodes.count):
        for pid in nodes.pids(machine):
            for name in ("cmdline", "environ"):
                assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()
    if server is not None:
        entries = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
        (named,) = [entry.partition(b"=")[2] for entry in entries if entry.startswith(SECRET_FILE.encode())]
        own = Path(f"/proc/{server}/root{os.fsdecode(named)}")
        assert own.read_bytes().strip() == secret
        assert own.stat().st_mode & 0o777 == 0o600
