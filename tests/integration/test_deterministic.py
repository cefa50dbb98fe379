"""A deterministic run that was killed and resumed ends with the bytes of an unbroken one. Its batches can be replayed.

All runs share one real server. Trainer, orchestrator and launcher are killed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from support.processes import wait_until
from support.rl_run import Run
from support.servers import run_server, secret_shared
from trivet.checkpoints.commit import committed_steps
from trivet.config.layout import RunLayout
from trivet.faults import Fault, FaultAction, Schedule, happened_directory
from trivet.transport.recording import recorded_steps
from trivet.weights.manifest import verify

pytestmark = pytest.mark.vllm

CONFIG = """
max_steps = {max_steps}
seq_len = 128
output_dir = "{output_dir}"
deterministic = true
inference = "None"
model.name = "{model}"
ckpt.interval = 2
recovery.max_restarts = 10
recovery.backoff_s = 0.1

[trainer]
optim.lr = 1e-3
data.record = true

[orchestrator]
model.name = "{model}"
batch_size = 8
rollouts_per_example = 4
sampling.max_tokens = 12
buffer.online_difficulty_filtering = true
client.base_url = ["@SERVER@/v1"]

[[orchestrator.env]]
id = "vowels"
"""

MakeRun = Callable[..., Run]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "inference.stdout"
    with (
        run_server(tiny_model, log=log, deterministic="true", **{"model.max_model_len": "128"}) as server,
        secret_shared(server),
    ):
        yield server.base_url


@pytest.fixture(scope="module")
def make_run(server: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    made: list[Run] = []

    def make(name: str, *, max_steps: int) -> Run:
        directory = tmp_path_factory.mktemp("runs") / name
        made.append(Run(directory, tiny_model, max_steps=max_steps, template=CONFIG.replace("@SERVER@", server)))
        return made[-1]

    yield make
    for run in made:
        run.stop()


@dataclass(frozen=True)
class Kill:
    """One SIGKILL of a process, sent when a role reaches a point of step `step`."""

    victim: str
    point: str
    step: int


def finish(run: Run, *flags: str) -> None:
    if run.process is None or run.process.poll() is not None:
        run.start(*flags)
    assert run.await_exit() == 0, run.output[-6000:]


def break_and_finish(run: Run, kills: Sequence[Kill], *, schedule: Path) -> None:
    """Break the run and finish it. Roles kill themselves and are restarted; the launcher is killed while the role at the point
    stands still."""
    faults = {
        f"{number}_{kill.victim}": Fault(
            name=f"{number}_{kill.victim}",
            point=kill.point,
            step=kill.step,
            action=FaultAction.STOP if kill.victim == "launcher" else FaultAction.KILL,
        )
        for number, kill in enumerate(kills)
    }
    schedule.write_bytes(msgspec.json.encode(Schedule(seed=0, faults=list(faults.values()))))
    flags = ("--faults.schedule", str(schedule))
    process = run.start(*flags)
    for name in faults:
        happened = happened_directory(schedule) / f"{name}.json"
        wait_until(
            lambda happened=happened, process=process: happened.exists() or process.poll() is not None,
            timeout_s=1200,
            waiting_for=f"{name}: {run.output[-3000:]}",
        )
        assert process.poll() is None, run.output[-6000:]
        if name.endswith("launcher"):
            process.kill()
            process.wait(120)
            process = run.start(*flags, "--ckpt.resume-step", "-1")
    assert run.await_exit() == 0, run.output[-6000:]


def batches_of(layout: RunLayout) -> dict[int, bytes]:
    return {step: layout.recorded_batch(step).read_bytes() for step in recorded_steps(layout)}


def assert_equal_runs(ours: RunLayout, theirs: RunLayout, *, max_steps: int) -> None:
    assert list(batches_of(ours)) == list(range(1, max_steps + 1))
    differing = [step for step, batch in batches_of(ours).items() if batch != batches_of(theirs)[step]]
    assert not differing
    assert verify(ours.weights_step(max_steps)).digest == verify(theirs.weights_step(max_steps)).digest


def replay(layout: RunLayout, into: Path) -> RunLayout:
    words = ["@", str(layout.configs / "trainer.toml"), "--data.replay", str(layout.root), "--output-dir", str(into)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}  # every core for one rank, as from the launcher
    command = [sys.executable, "-m", "trivet.launcher.commands.trainer", *words, "--ckpt.resume-step", "None"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=960, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return RunLayout(into)


@pytest.fixture(scope="module")
def unbroken(make_run: MakeRun) -> Run:
    run = make_run("unbroken", max_steps=12)
    finish(run)
    return run


def test_twelve_steps_killed_at_six_points_are_byte_equal_and_two_ranks_are_close(
    make_run: MakeRun, unbroken: Run, tmp_path: Path
) -> None:
    broken, two_ranks = (make_run(name, max_steps=12) for name in ("broken", "two_ranks"))
    kills = [
        Kill("trainer", "optimizer_step.during", 3),
        Kill("orchestrator", "dispatch.after", 5),
        Kill("launcher", "commit.after", 6),
        Kill("trainer", "stable.before", 8),
        Kill("orchestrator", "orchestrator_half.during", 10),
        Kill("launcher", "batch_send.after", 11),
    ]
    break_and_finish(broken, kills, schedule=tmp_path / "faults.json")
    assert_equal_runs(broken.layout, unbroken.layout, max_steps=12)

    # A fork of the unbroken run at step 6, which stays as it is, goes on with two ranks.
    flags = ["--ckpt.resume-from", str(unbroken.layout.root), "--ckpt.resume-step", "6", "--trainer-cpu-ranks", "2"]
    digest = verify(unbroken.layout.weights_step(12)).digest
    finish(two_ranks, *flags)
    assert verify(unbroken.layout.weights_step(12)).digest == digest
    theirs = load_file(unbroken.layout.weights_step(12) / "model.safetensors")
    for name, weight in load_file(two_ranks.layout.weights_step(12) / "model.safetensors").items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-5)


def test_a_replay_of_recorded_batches_ends_with_the_same_weights(unbroken: Run, tmp_path: Path) -> None:
    replayed = replay(unbroken.layout, tmp_path / "replayed")
    assert verify(replayed.weights_step(12)).digest == verify(unbroken.layout.weights_step(12)).digest
    assert committed_steps(replayed) == committed_steps(unbroken.layout)


def test_a_changed_setting_is_refused_before_anything_starts(unbroken: Run) -> None:
    before, said_before = sorted(path.name for path in unbroken.layout.checkpoints.iterdir()), len(unbroken.output)
    process = unbroken.start("--ckpt.resume-step", "2", "--trainer.optim.lr", "0.5")
    assert process.wait(240) == 2
    said = unbroken.output[said_before:]
    assert "optim.lr was 0.001 and is 0.5 now" in said
    assert 'ckpt.allow_changes = ["optim.lr"]' in said
    assert "started" not in said
    assert sorted(path.name for path in unbroken.layout.checkpoints.iterdir()) == before
