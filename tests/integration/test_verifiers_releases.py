"""Environments with every generation of the verifiers API, each in a virtual environment that holds that release alone.

Slow: it fills them with uv, from its cache or over the network. VERIFIERS_VENVS keeps them between runs.
"""

import json
import os
import subprocess
from pathlib import Path

import msgspec
import psutil
import pytest

from support.processes import assert_all_gone, descendants_of, wait_until
from support.v1_program import Order
from support.venvs import interpreter_with
from trivet.wire.groups import GroupRequest, SamplingArguments, ServerAccess
from trivet.wire.versions import GroupId
from trivet.wire.workers import HostSettings

ROOT = Path(__file__).parents[2]
V0_RELEASES = ["0.3.0", "0.3.1"]
"""The releases with the v0 API that are run."""


def run_with(python: Path, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program of these tests with another interpreter."""
    path = [ROOT / "src", ROOT / "tests", ROOT / "tests" / "support" / "environments"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [str(python), *command], capture_output=True, text=True, timeout=timeout_s, env=environ, cwd=ROOT, check=False
    )


@pytest.mark.parametrize("release", V0_RELEASES)
def test_every_kind_of_environment_runs_with_a_release_of_the_v0_api(release: str, tmp_path: Path) -> None:
    done = run_with(interpreter_with(release, tmp_path), "tests/support/release_program.py", timeout_s=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    kinds = {kind: found[kind] for kind in ("single", "multi", "tools", "reward error")}
    assert kinds == dict.fromkeys(kinds, "ok")


def test_the_v1_api_trains_on_the_tokens_of_the_server(tmp_path: Path) -> None:
    python = interpreter_with("0.4.0", tmp_path, "pytest")
    options = ["--noconftest", "-o", "addopts=", "-W", "default", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    done = run_with(python, "-m", "pytest", "tests/unit/environments/apis/v1", *options, timeout_s=900)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " skipped" not in done.stdout


def test_the_environment_of_reasoning_gym_runs_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    python = interpreter_with("0.3.1", tmp_path, "pytest", "datasets", "reasoning-gym")
    options = ["--noconftest", "-o", "addopts=", "-W", "default", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    done = run_with(python, "-m", "pytest", "tests/unit/environment_packages/test_reasoning_tasks.py", *options, timeout_s=300)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " skipped" not in done.stdout


def test_a_worker_that_is_killed_leaves_no_program_of_a_harness(tmp_path: Path) -> None:
    """verifiers starts programs in sessions of their own, so ending the worker's session would not reach them."""
    python = interpreter_with("0.4.0", tmp_path, "pytest")
    settings = HostSettings(
        env_id="talks",
        name="toy",
        args={"rows": [{"way": "program"}]},
        model_name="m",
        servers=ServerAccess(base_urls=["http://127.0.0.1:9"], key_variables=["OPENAI_API_KEY"]),
    )
    request = GroupRequest(
        group_id=GroupId(1),
        env="toy",
        example_id=0,
        num_rollouts=1,
        base_url="http://127.0.0.1:9",
        sampling=SamplingArguments(temperature=1.0),
    )
    path = [ROOT / "src", ROOT / "tests", ROOT / "tests" / "support" / "environments"]
    worker = subprocess.Popen(
        [str(python), str(ROOT / "tests/support/v1_program.py"), str(tmp_path)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    programs: list[psutil.Process] = []

    def is_started() -> bool:
        programs[:] = [each for each in descendants_of(worker.pid) if "sleep" in each.name()]
        return bool(programs)

    try:
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode([Order(settings=settings, request=request)]))
        worker.stdin.close()
        wait_until(is_started, timeout_s=240.0, waiting_for="the program of the harness")
    finally:
        worker.kill()
        worker.wait()
    assert_all_gone(programs)
