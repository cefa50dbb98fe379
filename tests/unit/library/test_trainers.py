"""A loop over the steps of a run, with a stand-in for the command that it starts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes import heed_signals, wait_until
from support.stand_in_command import COMMITTED, COMMITTING, ENDLESS, FAILING, REFUSED, SLOW_COMMIT
from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError, RoleFailed
from trivet.library.process import PYTHON_NAMES
from trivet.library.run import Run, RunStep
from trivet.library.trainers import _Trainer

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _find_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def trainer(
    tmp_path: Path, max_steps: int, *, callbacks: list[Callable[[RunStep], object]] | None = None, resume: bool = False
) -> _Trainer:
    words = ["--output-dir", str(tmp_path), "--max-steps", str(max_steps), "--orchestrator.rollouts-per-example", "2"]
    words += ["--ckpt.resume-step", "-1"] if resume else []
    return _Trainer(
        load_config(RLConfig, words, environ={}).config,
        module="support.stand_in_command",
        names=PYTHON_NAMES,
        callbacks=callbacks or [],
        progress=False,
    )


def test_every_step_is_yielded_however_slow_the_loop_is(tmp_path: Path) -> None:
    seen: list[int] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    running = trainer(tmp_path, 8, callbacks=[lambda step: seen.append(step.number)])
    for step in running:
        if step.number == 1:
            time.sleep(0.6)  # the command ends meanwhile
        assert step.reward == step.number / 10
    assert seen == [step.number for step in running.run.steps] == list(range(1, 9))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_the_configuration_can_be_given_to_the_command(tmp_path: Path) -> None:
    file = trainer(tmp_path, 3).save_config(tmp_path / "run.toml")
    assert load_config(RLConfig, ["@", str(file)], environ={}).config.max_steps == 3
    assert file.stat().st_mode & 0o777 == 0o600


def test_leaving_the_loop_lets_the_run_commit_and_end(tmp_path: Path) -> None:
    running = trainer(tmp_path, ENDLESS)
    for step in running:
        if step.number == 2:
            break
    assert (tmp_path / COMMITTED).exists()
    assert not running._process.is_running


def test_an_error_in_the_loop_ends_the_run(tmp_path: Path) -> None:
    running = trainer(tmp_path, ENDLESS)

    def loop() -> None:
        for step in running:
            assert 1 // (step.number - 2) <= 0

    with pytest.raises(ZeroDivisionError):
        loop()
    assert not running._process.is_running


def test_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    stopped: list[int] = []

    def stop_at_2(step: RunStep) -> None:
        if step.number == 2:
            running.stop()
            stopped.append(step.number)

    running = trainer(tmp_path, ENDLESS, callbacks=[stop_at_2])
    numbers = [step.number for step in running]
    assert stopped == [2]
    assert numbers == list(range(1, len(numbers) + 1))


def test_one_loop_takes_the_steps_of_a_run(tmp_path: Path) -> None:
    running = trainer(tmp_path, ENDLESS)
    steps = iter(running)
    next(steps)
    with pytest.raises(ConfigError, match="one loop takes its steps"):
        next(iter(running))
    running.stop()
    rest = [step.number for step in steps]
    assert rest == list(range(2, 2 + len(rest)))


def test_a_refusal_of_the_process_has_the_names_of_the_library(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^batch_size is wrong; add overwrite_output_dir=True$"):
        trainer(tmp_path, REFUSED).train()


def test_a_failure_comes_after_the_steps_and_has_the_last_lines(tmp_path: Path) -> None:
    seen: list[int] = []
    failing = trainer(tmp_path, FAILING, callbacks=[lambda step: seen.append(step.number)])
    with pytest.raises(RoleFailed, match=r"(?s)exit code 1.*last words of a role"):
        failing.train()
    assert seen == [1, 2, 3]


def test_a_stop_after_a_failure_hides_nothing(tmp_path: Path) -> None:
    def stop_when_over(step: RunStep) -> None:
        wait_until(lambda: running._process.exit_code is not None, timeout_s=60, waiting_for="the end of the run")
        running.stop()

    running = trainer(tmp_path, FAILING, callbacks=[stop_when_over])
    with pytest.raises(RoleFailed, match="exit code 1"):
        running.train()


PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from unit.library.test_trainers import trainer
for step in trainer(Path({output!r}), 1003):
    if step.number == 2:
        Path({output!r}, "looping").touch()
        {body}
"""


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
@pytest.mark.parametrize("body", ["pass", "while True: time.sleep(0.05)"])
def test_a_signal_has_the_run_commit_and_a_second_ctrl_c_ends_it_at_once(
    tmp_path: Path, signals: list[signal.Signals], body: str
) -> None:
    if len(signals) == 2:
        (tmp_path / SLOW_COMMIT).touch()
    program = PROGRAM.format(tests=str(TESTS), output=str(tmp_path), body=body)
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ, preexec_fn=heed_signals, stderr=subprocess.PIPE, text=True
    )

    def wait_for(name: str) -> None:
        wait_until(lambda: (tmp_path / name).exists() or process.poll() is not None, timeout_s=60, waiting_for=name)

    try:
        wait_for("looping")
        process.send_signal(signals[0])
        if len(signals) == 2:
            wait_for(COMMITTING)
            process.send_signal(signals[1])
        _, printed = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / COMMITTED).exists() == (len(signals) == 1), printed
    assert process.returncode == (143 if signals[0] is signal.SIGTERM else -signal.SIGINT), printed


def test_no_step_is_lost_between_the_loops_of_a_run_and_its_resume(tmp_path: Path) -> None:
    first = []
    for step in trainer(tmp_path, ENDLESS):
        first.append(step.number)
        if step.number == 2:
            break
    committed = Run(tmp_path).steps[-1].number  # the run finished these steps before it ended
    (RunLayout(tmp_path).checkpoint_step(committed)).mkdir(parents=True)
    (RunLayout(tmp_path).checkpoint_step(committed) / "COMMITTED").touch()
    second = []
    for step in trainer(tmp_path, ENDLESS, resume=True):
        second.append(step.number)
        if step.number > committed:
            break
    assert [*first, *second] == list(range(1, committed + 2))
