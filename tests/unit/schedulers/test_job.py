import os
import sys
from pathlib import Path

import pytest

from trivet.config.layout import COMMITTED
from trivet.config.loading.load import load_config
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.sft import SftConfig
from trivet.schedulers import job
from trivet.schedulers.job import count_restarts, flags_after_restart

NEEDED = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x"]
GOING_ON = {
    "trainer.ckpt.resume_step": -1,
    "orchestrator.ckpt.resume_step": -1,
    "trainer.ckpt.resume_from": None,
    "orchestrator.ckpt.resume_from": None,
}


def commit(directory: Path, step: int) -> None:
    checkpoint = directory / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / COMMITTED).write_text("{}")


def value(config: object, key: str) -> object:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("environ", "count"), [({}, 0), ({"SLURM_RESTART_COUNT": "2"}, 2)])
def test_the_scheduler_says_how_often_it_started_the_job_again(environ, count):
    assert count_restarts(environ) == count


@pytest.mark.parametrize("written", [[], ["--ckpt.resume-step", "5"], ["--trainer.ckpt.resume-step", "5"], ["--clean"]])
def test_a_run_goes_on_from_its_newest_commit_whatever_it_was_started_with(tmp_path, written):
    commit(tmp_path, 4)
    given = [*NEEDED, "--output-dir", str(tmp_path), *written]
    again = load_config(RLConfig, [*given, *flags_after_restart(load_config(RLConfig, given).config)]).config
    assert {key: value(again, key) for key in GOING_ON} == GOING_ON
    assert not again.clean


def test_a_run_that_committed_nothing_begins_anew_over_what_it_left(tmp_path):
    config = load_config(RLConfig, [*NEEDED, "--output-dir", str(tmp_path)]).config
    assert flags_after_restart(config) == ["--clean"]


def test_fine_tuning_goes_on_from_its_newest_commit(tmp_path):
    given = ["--output-dir", str(tmp_path)]
    config = load_config(SftConfig, given).config
    assert flags_after_restart(config) == []
    commit(tmp_path, 4)
    assert load_config(SftConfig, [*given, *flags_after_restart(config)]).config.ckpt.resume_step == -1


def test_an_evaluation_goes_on_with_what_is_missing(tmp_path):
    config = load_config(EvalConfig, ["--env.id", "x", "--output-dir", str(tmp_path)]).config
    assert flags_after_restart(config) == ["--resume-path", str(tmp_path)]


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_the_command_takes_the_place_of_this_process(tmp_path, monkeypatch, restarts):
    file, pid_file = tmp_path / "sft.toml", tmp_path / "job.pid"
    file.write_text(f'output_dir = "{tmp_path}"\n')
    commit(tmp_path, 4)
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: became.append(words))
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    monkeypatch.setattr(sys, "argv", ["job", "sft", str(file), "--pid-file", str(pid_file)])
    job.main()
    assert pid_file.read_text() == f"{os.getpid()}\n"
    (words,) = became
    assert words[:6] == [sys.executable, "-P", "-m", "trivet.launcher.commands.sft", "@", str(file)]
    assert words[6:] == (["--ckpt.resume-step=-1", "--ckpt.resume-from=None"] if restarts == "1" else [])
