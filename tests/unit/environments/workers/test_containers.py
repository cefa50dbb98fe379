"""What a worker started in containers goes with its directory: at its end, at the next start, and by the doctor."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from support.stand_in_docker import install
from trivet.cli.doctor import collect_facts, diagnose
from trivet.environments.workers.containers import record_engine, remove_containers
from trivet.environments.workers.limits import WorkerDirectory, sweep_directories


@pytest.fixture(autouse=True)
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Containers of a stand-in for docker and podman that is first on PATH."""
    found = tmp_path / "containers"
    for engine in ("docker", "podman"):
        install(tmp_path / "programs", found, engine=engine)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return found


def start_container(scope: str, *, engine: str = "docker") -> str:
    command = [engine, "run", "--label", f"verifiers.run={scope}", "--detach", "image"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def leave(directory: WorkerDirectory) -> None:
    """Give the directory up as a pool does that is killed."""
    os.close(directory._lock)
    directory._lock = -1


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_the_containers_of_a_worker_go_with_its_directory(engine: str, containers: Path) -> None:
    directory = WorkerDirectory()
    record_engine(directory.path, engine)
    record_engine(directory.path, engine)
    other = start_container("trivet-worker-of-another-run", engine=engine)
    start_container(directory.path.name, engine=engine)
    start_container(directory.path.name, engine=engine)
    directory.remove()
    assert [path.name for path in containers.iterdir()] == [other]
    assert not directory.path.exists()


def test_the_containers_of_a_killed_pool_go_at_the_next_start_and_those_of_a_live_one_stay(containers: Path) -> None:
    killed, live = WorkerDirectory(), WorkerDirectory()
    for each in (killed, live):
        record_engine(each.path, "docker")
    start_container(killed.path.name)
    stays = start_container(live.path.name)
    leave(killed)
    assert sweep_directories() == 1
    assert [path.name for path in containers.iterdir()] == [stays]
    live.remove()
    assert list(containers.iterdir()) == []


def test_the_doctor_removes_what_a_killed_run_left_and_says_so(tmp_path: Path, containers: Path) -> None:
    killed = WorkerDirectory()
    record_engine(killed.path, "docker")
    start_container(killed.path.name)
    leave(killed)
    found = [item.found for item in diagnose(collect_facts(tmp_path, environ={})) if item.subject == "containers"]
    assert found == ["1 that environments of a killed run left: removed now"]
    assert list(containers.iterdir()) == []


def test_an_engine_that_fails_or_has_gone_is_said_and_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_engine(tmp_path, "no-such-engine")
    assert remove_containers(tmp_path) == 0
    assert f"containers of no-such-engine with the label verifiers.run={tmp_path.name} cannot be removed" in caplog.text


def test_a_worker_without_containers_asks_no_engine(tmp_path: Path) -> None:
    (tmp_path / "programs" / "docker").write_text("#!/bin/sh\nexit 1\n")
    directory = WorkerDirectory()
    directory.remove()
    assert not directory.path.exists()
