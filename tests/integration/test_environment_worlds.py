"""Environments of three kinds train in one run: verifiers 0.3.0, the v1 API, and pins that trivet itself cannot have.

Slow: it fills virtual environments with uv, from its cache or over the network, and runs the real vLLM.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from support.histories import assert_proven
from support.packages import write_source
from support.rl_run import CONFIG, ENVIRONMENTS, Run
from support.servers import run_server, secret_shared
from trivet.config.layout import RunLayout
from trivet.evaluation.scores import Summary
from trivet.history.check import check_run
from trivet.telemetry.events import read_events
from trivet.wire.events import Dispatch, EnvLoad, Finish

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
MAX_STEPS = 4
NAMES = ["old-vowels", "count-letters", "pinned-vowels"]

OLD_RELEASE = "0.3.0"
PINS = ["verifiers==0.3.1", "rich==13.9.4", "msgspec==0.18.6"]
"""trivet needs rich 14 and msgspec 0.20."""
REQUIRE_PINS = """
from importlib.metadata import version

assert (version("rich"), version("msgspec")) == ("13.9.4", "0.18.6")
"""

ENTRIES = "".join(
    f'[[orchestrator.env]]\nid = "{name}"\nargs = {{{{ {count} = 32 }}}}\n'
    for name, count in zip(NAMES, ("num_examples", "num_tasks", "num_examples"), strict=True)
)
"""As many examples each, so that few steps have groups of all three."""
EVALUATIONS = f"""
[orchestrator.eval]
interval = 2
num_examples = 2
sampling = {{{{ max_tokens = 12, seed = 1 }}}}
env = [{", ".join(f'{{{{ id = "{name}" }}}}' for name in NAMES)}]
"""
THREE_KINDS = CONFIG.replace('[[orchestrator.env]]\nid = "vowels"\n', ENTRIES) + EVALUATIONS


def trivet_environ(venvs: Path) -> dict[str, str]:
    return os.environ | {"TRIVET_VENVS": str(venvs)}


def run_trivet(venvs: Path, module: str, *words: str, timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
    """Run one of trivet's commands in the root of the checkout."""
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        env=trivet_environ(venvs),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three environments, installed by the command that a user types."""
    folder = tmp_path_factory.mktemp("sources")
    vowels = (ENVIRONMENTS / "vowels.py").read_text()
    old = write_source(folder, NAMES[0], requires=[f"verifiers=={OLD_RELEASE}"], module=vowels)
    pinned = write_source(folder, NAMES[2], requires=PINS, module=vowels + REQUIRE_PINS)
    home = tmp_path_factory.mktemp("venvs")
    for what in (str(old), "count-letters", str(pinned)):
        done = run_trivet(home, "trivet.cli.main", "env", "install", what)
        assert done.returncode == 0, done.stdout + done.stderr
    return home


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[Run]:
    run = Run(tmp_path, tiny_model, max_steps=MAX_STEPS, template=THREE_KINDS)
    yield run
    run.stop()


def scored_environments(directories: Sequence[Path]) -> set[str]:
    """The environments whose evaluation has a score, without a failed example."""
    summaries = [msgspec.json.decode((directory / "summary.json").read_bytes(), type=Summary) for directory in directories]
    return {summary.env for summary in summaries if summary.avg is not None and summary.num_failed == 0}


def test_three_kinds_of_environments_train_and_are_evaluated_in_one_run(run: Run, venvs: Path) -> None:
    run.start(environment=trivet_environ(venvs))
    assert run.await_exit() == 0, run.output[-6000:]

    assert assert_proven(check_run(run.layout)).last_step == MAX_STEPS
    events = list(read_events(run.layout.events))
    loads = {event.env: event for event in events if isinstance(event, EnvLoad)}
    assert {name: loads[name].api for name in NAMES} == dict(zip(NAMES, ("v0", "v1", "v0"), strict=True))
    assert loads["old-vowels"].verifiers == OLD_RELEASE
    assert loads["count-letters"].verifiers.startswith("0.4")
    assert loads["pinned-vowels"].verifiers == "0.3.1"
    finished = {event.group_id for event in events if isinstance(event, Finish)}
    assert {event.env for event in events if isinstance(event, Dispatch) and event.group_id in finished} == set(NAMES)
    assert scored_environments([path.parent for path in run.layout.evals.glob("step_*/*/summary.json")]) == set(NAMES)


def test_three_kinds_of_environments_are_evaluated_by_the_command(venvs: Path, tiny_model: Path, tmp_path: Path) -> None:
    with run_server(tiny_model, log=tmp_path / "inference.stdout") as server, secret_shared(server):
        config = tmp_path / "eval.toml"
        config.write_text("".join(f'[[env]]\nid = "{name}"\n' for name in NAMES))
        words = ["--client.base-url", f"{server.base_url}/v1", "--num-examples", "3", "--sampling.max-tokens", "12"]
        done = run_trivet(venvs, "trivet.evaluation.main", "@", str(config), *words, "--output-dir", str(tmp_path / "scores"))
    assert done.returncode == 0, done.stdout + done.stderr
    layout = RunLayout(tmp_path / "scores")
    assert scored_environments([layout.evals_step(0, name) for name in NAMES]) == set(NAMES)
