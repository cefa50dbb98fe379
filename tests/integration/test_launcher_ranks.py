"""Run ranks on one machine and on two. Their exit code arrives, and none outlives the process that started it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.processes import assert_all_gone, descendants_of, find_free_port, kill_all, wait_until
from trivet.config.layout import RunLayout
from trivet.launcher.plan import rank_command, rank_environment
from trivet.weights.manifest import verify

TESTS = Path(__file__).parents[1]
STARTED_WITHIN_S = 240.0
TRAINED_WITHIN_S = 600.0


def start_ranks(directory: Path, behaviour: str, *, num_ranks: int = 2, **variables: str) -> "subprocess.Popen[bytes]":
    ours = {"PYTHONPATH": str(TESTS), **rank_environment(num_ranks, num_cpus=2, is_on_cpu=True)}
    environment = os.environ | ours | variables
    return subprocess.Popen(
        rank_command(sys.executable, "support.stand_in_rank", [behaviour], num_ranks=num_ranks, is_on_cpu=True),
        cwd=directory,
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", list[psutil.Process]]]:
    """Start two ranks that wait; yield the process that started them."""
    agent = start_ranks(tmp_path, "wait")
    wait_until(
        lambda: all((tmp_path / f"rank_{rank}.up").exists() for rank in range(2)),
        timeout_s=STARTED_WITHIN_S,
        waiting_for="two ranks",
    )
    processes = descendants_of(agent.pid)
    yield agent, processes
    agent.kill()
    agent.wait()
    kill_all(processes)


def test_the_exit_code_of_a_rank_is_that_of_the_command(tmp_path: Path) -> None:
    agent = start_ranks(tmp_path, "3")
    assert agent.wait(STARTED_WITHIN_S) == 3
    said = {path.read_text() for path in tmp_path.glob("rank_*.up")}  # the rank that ends first takes the other with it
    assert said == {"2 - 1"}


def test_a_single_rank_is_the_process_that_was_started(tmp_path: Path) -> None:
    """Variables of other ranks, as a job of SLURM or torchrun has them, change nothing."""
    rank = start_ranks(tmp_path, "3", num_ranks=1, RANK="5", LOCAL_RANK="1", WORLD_SIZE="8")
    assert rank.wait(STARTED_WITHIN_S) == 3
    assert (tmp_path / "rank_alone.up").read_text() == "- - 2"


def test_a_single_rank_has_no_agent_between_it_and_its_signals(tmp_path: Path) -> None:
    rank = start_ranks(tmp_path, "wait", num_ranks=1)
    try:
        wait_until((tmp_path / "rank_alone.up").exists, timeout_s=STARTED_WITHIN_S, waiting_for="the rank")
        assert descendants_of(rank.pid) == []
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(STARTED_WITHIN_S) == -signal.SIGTERM
    finally:
        rank.kill()
        rank.wait()


def test_no_rank_outlives_a_killed_agent(waiting: tuple["subprocess.Popen[bytes]", list[psutil.Process]]) -> None:
    agent, ranks = waiting
    agent.kill()
    agent.wait()
    assert_all_gone(ranks)


def test_sigterm_ends_the_ranks_and_is_the_exit_code(
    waiting: tuple["subprocess.Popen[bytes]", list[psutil.Process]],
) -> None:
    agent, ranks = waiting
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(STARTED_WITHIN_S) == 128 + signal.SIGTERM
    assert_all_gone(ranks)


def train_fake_batches(model: Path, output_dir: Path, *torchrun_words: str) -> "subprocess.Popen[bytes]":
    """Train two steps on made-up data, with the ranks that one torchrun starts on its machine."""
    flags = {
        "model.name": model,
        "model.compute-dtype": "float32",
        "model.seq-len": 64,
        "max-steps": 2,
        "output-dir": output_dir,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *torchrun_words]
    with (output_dir.parent / "torchrun.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "-m", "trivet.trainer.main", *words, "--data.fake.batch-size", "4", "--device", "cpu"],
            env=os.environ | rank_environment(2, num_cpus=2, is_on_cpu=True),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def test_two_machines_are_one_trainer(tiny_model: Path, tmp_path: Path) -> None:
    """Each machine is a separate torchrun here. Together they publish and commit what both learned."""
    port, layout = find_free_port(), RunLayout(tmp_path / "run")
    address = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    machines = [train_fake_batches(tiny_model, layout.root, *address, "--node-rank", str(rank)) for rank in range(2)]
    try:
        codes = [machine.wait(TRAINED_WITHIN_S) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert codes == [0, 0], (tmp_path / "torchrun.log").read_text()[-3000:]
    assert verify(layout.weights_step(2)).version == 2
    assert sorted(path.name for path in layout.logs.glob("trainer/*")) == ["rank_0.stdout", "rank_1.stdout"]
