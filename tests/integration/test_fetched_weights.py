"""Test runs whose server fetches policies, with real roles: on one machine, and on two without a common directory."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.conftest import MakeRun
from support.histories import assert_proven
from support.nodes import Nodes, can_make_nodes
from support.processes import assert_all_gone, descendants_of, heed_signals
from support.rl_run import CONFIG, Run
from trivet.config.layout import SECRET_FILE
from trivet.history.check import check_run
from trivet.secret import make_secret
from trivet.step_directories import list_steps
from trivet.telemetry.events import read_events
from trivet.weights.manifest import read_manifest
from trivet.wire.events import Load, Publish, Restart, ServerUp

TEMPLATE = (
    CONFIG
    + """
[weights]
transport = "http"
delta = true
"""
)
DISTANT = (
    'inference = "None"'
    + CONFIG[: CONFIG.index("[inference]")]
    + """
[weights]
transport = "http"
origin = {{ host = "10.214.0.1" }}

[orchestrator.client]
base_url = ["http://10.214.0.2:8000/v1"]
wait_for_ready_timeout = 900
"""
)
"""The configuration of a run whose server somebody else starts on another machine."""


def assert_served_what_was_published(run: Run, *, num_restarts: int) -> None:
    """Prove the run, and that each loaded policy has the digest of the published one."""
    assert_proven(check_run(run.layout))
    events = list(read_events(run.layout.events))
    published = {(event.version, event.digest) for event in events if isinstance(event, Publish)}
    loaded = {(event.version, event.digest) for event in events if isinstance(event, Load | ServerUp) and event.version}
    assert loaded <= published
    assert len({version for version, _ in loaded}) > 3  # a server that is slower than the trainer skips versions
    assert len([event for event in events if isinstance(event, Restart)]) == num_restarts


def test_a_server_of_the_run_fetches_from_the_origin_which_may_be_killed(make_run: MakeRun) -> None:
    run = make_run(max_steps=12, template=TEMPLATE)
    run.start("--trainer.optim.lr", "1e-6")  # at the usual rate of this model, deltas are too large
    run.wait_for(run.layout.weights_step(2))
    run.role("origin").kill()
    assert run.await_exit() == 0, run.output[-4000:]
    assert_served_what_was_published(run, num_restarts=1)
    log = run.layout.log_file("inference.stdout").read_text()
    assert "policy fetched" in log
    assert "is of no use" not in log
    newest = max(list_steps(run.layout.weights).items())[1]
    assert read_manifest(newest).deltas


class Machine:
    """One of two machines: a namespace with an address, in which the directory of the other machine is empty."""

    def __init__(self, nodes: Nodes, index: int, own: Path, other: Path) -> None:
        self.own = own
        (own / "tmp").mkdir(parents=True)
        namespace = ("ip", "netns", "exec", f"{nodes.name}-{index}")
        script = f'mount --make-rprivate / && mount -t tmpfs tmpfs {other} && exec "$@"'
        self.prefix = (*namespace, "unshare", "--mount", "sh", "-c", script, "sh")
        secret = own / "secret"
        secret.write_bytes((other / "secret").read_bytes()) if (other / "secret").exists() else make_secret(secret)
        secret.chmod(0o600)
        self.environment = {**os.environ, "TMPDIR": str(own / "tmp"), SECRET_FILE: str(secret)}


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    nodes = Nodes(2)
    root = Path(tempfile.mkdtemp())  # short: the names of vLLM's sockets have at most 107 characters
    try:
        nodes.make()
        first, second = root / "first", root / "second"
        first.mkdir()
        second.mkdir()
        yield Machine(nodes, 0, first, second), Machine(nodes, 1, second, first)
    finally:
        nodes.remove()
        shutil.rmtree(root)


@contextmanager
def serving(machine: Machine, model: Path) -> Iterator[None]:
    """Start the server as a user does by hand, with an output directory of that machine alone. Kill it after the block."""
    (machine.own / "inference.toml").write_text(f"""
output_dir = "{machine.own}/outputs"
max_num_seqs = 32
cpu_kv_cache_gib = 0.25

[server]
host = "0.0.0.0"

[model]
name = "{model}"
dtype = "float32"
max_model_len = 256
enforce_eager = true
""")
    command = [*machine.prefix, sys.executable, "-m", "trivet.inference.main", "@", str(machine.own / "inference.toml")]
    with (machine.own / "inference.out").open("ab") as log:
        process = subprocess.Popen(
            command, env=machine.environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=heed_signals
        )
    try:
        yield
        assert process.poll() is None, (machine.own / "inference.out").read_text()[-4000:]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(not can_make_nodes(), reason="needs root and ip")
def test_two_machines_without_a_common_directory_train_a_run_that_is_killed_on_both_sides(
    machines: tuple[Machine, Machine], tiny_model: Path
) -> None:
    training, generating = machines
    run = Run(training.own, tiny_model, max_steps=18, template=DISTANT)
    try:
        with serving(generating, tiny_model):
            run.start(environment=training.environment, prefix=training.prefix)
            run.wait_for(run.layout.weights_step(3))
        with serving(generating, tiny_model):  # it has the start model again
            run.wait_for(run.layout.checkpoint_step(6))
            assert run.process is not None
            roles = descendants_of(run.process.pid)
            os.killpg(run.process.pid, signal.SIGKILL)  # the launcher takes trainer, orchestrator and origin with it
            run.process.wait()
            assert_all_gone(roles)
            run.start("--ckpt.resume-step", "-1", environment=training.environment, prefix=training.prefix)
            assert run.await_exit() == 0, run.output[-4000:]
    finally:
        run.stop()
    assert_served_what_was_published(run, num_restarts=0)
    assert not (generating.own / "outputs" / "weights").exists()
    log = (generating.own / "inference.out").read_text()
    assert "policy fetched" in log, log[-4000:]
