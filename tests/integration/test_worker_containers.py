"""A container that verifiers 0.4 started in a worker that is killed carries the worker's label, and is removed with it."""

import os
import subprocess
from pathlib import Path

import pytest

from support.stand_in_docker import install
from support.venvs import interpreter_with
from trivet.environments.workers.containers import SCOPE
from trivet.environments.workers.limits import WorkerDirectory

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_of_a_killed_worker_is_removed(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = interpreter_with("0.4.0", tmp_path)
    containers = tmp_path / "containers"
    install(tmp_path / "programs", containers, engine=engine)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    directory = WorkerDirectory()
    with subprocess.Popen(
        [python, str(ROOT / "tests" / "support" / "container_program.py"), engine],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(directory.path), SCOPE: directory.path.name},
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "started\n"
        worker.kill()
    [container] = containers.iterdir()
    assert container.read_text() == f"verifiers.run={directory.path.name}"
    directory.remove()
    assert list(containers.iterdir()) == []
