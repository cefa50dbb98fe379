"""Test the cluster's script with stand-ins for SLURM. An integration test runs it with the real daemons."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.processes import wait_until

SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm_cluster.sh"


def write_programs(directory: Path, **texts: str) -> Path:
    """Write programs of bash, by their names."""
    directory.mkdir()
    for name, text in texts.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    return directory


def run_script(*words: str, state: Path, programs: Path, timeout_s: float = 15) -> "subprocess.CompletedProcess[str]":
    environ = os.environ | {"SLURM_CLUSTER_DIR": str(state), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", SCRIPT, *words], env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture
def state() -> Iterator[Path]:
    """A path that is short enough for the sockets of SLURM."""
    with TemporaryDirectory(prefix="trivet-") as directory:
        yield Path(directory) / "state"


def test_a_cluster_whose_namespaces_are_refused_fails_at_once_and_can_be_ended(tmp_path: Path, state: Path) -> None:
    daemons = dict.fromkeys(("slurmctld", "slurmd", "munged"), "exit 1")
    programs = write_programs(
        tmp_path / "programs", id="echo 0", unshare="echo refused >&2; exit 1", nsenter="exit 1", ip="exit 1", **daemons
    )
    done = run_script("up", "1", state=state, programs=programs)
    assert done.returncode == 1
    assert "the namespaces of switch were refused" in done.stderr
    assert "refused" in (state / "switch.holder.log").read_text()
    assert run_script("down", state=state, programs=programs).returncode == 0
    assert not state.exists()


@contextmanager
def started(*command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command in a session of its own."""
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_the_end_of_a_cluster_whose_controller_has_died_ends_the_processes_of_its_jobs(tmp_path: Path, state: Path) -> None:
    state.mkdir()
    programs = write_programs(tmp_path / "programs", scancel="exit 1", squeue="exit 1")
    with ExitStack() as held:
        holder = held.enter_context(started("unshare", "--net", "sleep", "60"))
        comm = Path(f"/proc/{holder.pid}/comm")
        wait_until(lambda: comm.read_text() == "sleep\n", timeout_s=10, waiting_for="the namespace")
        step = held.enter_context(started("nsenter", "--target", str(holder.pid), "--net", "sleep", "60"))
        bystander = held.enter_context(started("sleep", "60"))
        since = Path(f"/proc/{holder.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        # The second one has ended, and another process has its number now.
        (state / "pids").write_text(f"{holder.pid} {since}\n{bystander.pid} 1\n")
        (state / "controller.pid").write_text(f"{holder.pid}\n")
        done = run_script("down", state=state, programs=programs)
        assert done.returncode == 0, done.stderr
        assert step.wait(timeout=5) == -signal.SIGTERM
        assert holder.wait(timeout=5) == -signal.SIGTERM
        assert bystander.poll() is None
    assert not state.exists()
