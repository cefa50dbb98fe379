import json
import os
import sys
from pathlib import Path

import pytest

from trivet.config.layout import COMMITTED, RunLayout
from trivet.config.loading.load import load_config
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.sft import SftConfig
from trivet.schedulers import job
from trivet.schedulers.job import Progress, await_decision, decide, decided_file, go_on, read_progress, run_beside

NEEDED = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x"]
NOTHING = Progress(run=None, commit=None)


def commit(directory: Path, step: int) -> None:
    checkpoint = directory / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / COMMITTED).write_text("{}")


def rl_config(*flags: str) -> RLConfig:
    return load_config(RLConfig, [*NEEDED, *flags]).config


def again(*flags: str, before: Progress, now: Progress) -> RLConfig:
    config = go_on(rl_config(*flags), before=before, now=now)
    assert isinstance(config, RLConfig)
    return config


def test_the_progress_of_a_run_is_its_attempt_and_its_newest_commit(tmp_path):
    assert read_progress(RunLayout(tmp_path)) == NOTHING
    commit(tmp_path, 4)
    commit(tmp_path, 12)
    (tmp_path / "run.json").write_text(json.dumps({"id": "a", "attempt": 2}))
    assert read_progress(RunLayout(tmp_path)) == Progress(run="a attempt 2", commit=12)


@pytest.mark.parametrize(
    "flags",
    [[], ["--ckpt.resume-step", "5"], ["--trainer.ckpt.resume-step", "5"], ["--clean"], ["--ckpt.skip-optimizer"]],
)
def test_a_run_goes_on_whole_from_its_newest_commit_whatever_it_was_started_with(flags):
    config = again(*flags, before=NOTHING, now=Progress(run="a", commit=4))
    assert not config.clean
    for ckpt in (config.ckpt, config.trainer.ckpt, config.orchestrator.ckpt):
        assert (ckpt.resume_step, ckpt.resume_from, ckpt.skip_optimizer, ckpt.allow_changes) == (-1, None, False, [])


def test_a_fork_goes_on_from_its_own_commits_with_the_settings_that_it_changed(tmp_path):
    config = again("--ckpt.resume-from", str(tmp_path), before=NOTHING, now=Progress(run="a", commit=4))
    assert config.trainer.ckpt.resume_from is None
    assert config.trainer.ckpt.allow_changes == ["*"]


def test_a_run_that_committed_nothing_begins_anew_over_what_it_left():
    assert again(before=NOTHING, now=Progress(run="a", commit=None)).clean


@pytest.mark.parametrize("found", [NOTHING, Progress(run="other", commit=None), Progress(run="other", commit=7)])
def test_a_job_that_never_began_its_run_starts_as_the_first_time(found):
    """Its node failed early. What lies there is of another run, and a first start would refuse or resume it as configured."""
    flags = ["--ckpt.resume-step", "5"]
    assert again(*flags, before=found, now=found) == rl_config(*flags)


def test_fine_tuning_goes_on_from_its_newest_commit():
    config = load_config(SftConfig).config
    assert go_on(config, before=NOTHING, now=NOTHING) == config
    resumed = go_on(config, before=NOTHING, now=Progress(run=None, commit=4))
    assert isinstance(resumed, SftConfig)
    assert resumed.ckpt.resume_step == -1


def test_an_evaluation_goes_on_with_what_is_missing(tmp_path):
    config = load_config(EvalConfig, ["--env.id", "x", "--output-dir", str(tmp_path)]).config
    assert go_on(config, before=NOTHING, now=NOTHING) == config
    (tmp_path / "evals").mkdir()
    resumed = go_on(config, before=NOTHING, now=NOTHING)
    assert isinstance(resumed, EvalConfig)
    assert resumed.resume_path == tmp_path


def test_the_first_start_takes_the_configuration_as_it_is_and_a_further_one_goes_on(tmp_path):
    file, pid_file = tmp_path / "rl.toml", tmp_path / "17.pid"
    file.write_text(f'output_dir = "{tmp_path}"\n[orchestrator]\nrollouts_per_example = 4\n[[orchestrator.env]]\nid = "x"\n')
    first, again = decided_file(pid_file, {}), decided_file(pid_file, {"SLURM_RESTART_COUNT": "1"})
    decide("rl", file, pid_file=pid_file, decided=first)
    assert load_config(RLConfig, ["@", str(first)]).config == load_config(RLConfig, ["@", str(file)]).config
    commit(tmp_path, 4)
    decide("rl", file, pid_file=pid_file, decided=again)
    assert load_config(RLConfig, ["@", str(again)]).config.trainer.ckpt.resume_step == -1


def test_another_node_waits_for_what_the_first_decides(tmp_path):
    decided, waited = tmp_path / "17.0.toml", []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            decided.touch()

    await_decision(decided, sleep=sleep)
    assert len(waited) == 3


def test_what_becomes_of_another_node_is_not_the_job_s_exit_code(tmp_path, capsys):
    run_beside([sys.executable, "-c", "raise SystemExit(75)"])
    assert "this node ended with exit code 75; the first node decides" in capsys.readouterr().err
    run_beside([sys.executable, "-c", ""])
    assert capsys.readouterr().err == ""


def test_another_node_runs_the_command_beside_this_process_and_writes_no_process_id(tmp_path, monkeypatch):
    pid_file = tmp_path / "17.pid"
    decided_file(pid_file, {}).touch()
    ran: list[list[str]] = []
    monkeypatch.setattr("trivet.schedulers.job.run_beside", ran.append)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(sys, "argv", ["job", "rl", str(tmp_path / "rl.toml"), "--pid-file", str(pid_file)])
    job.main()
    assert ran == [[sys.executable, "-P", "-m", "trivet.launcher.commands.rl", "@", str(tmp_path / "17.0.toml")]]
    assert not pid_file.exists()


def test_the_command_takes_the_place_of_this_process_and_no_variable_changes_it(tmp_path, monkeypatch):
    file, pid_file = tmp_path / "sft.toml", tmp_path / "17.pid"
    file.write_text(f'output_dir = "{tmp_path}"\n')
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: became.append(words))
    monkeypatch.setenv("TRIVET_SLURM__PARTITION", "gpu")
    monkeypatch.setenv("TRIVET_VENVS", "/venvs")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(sys, "argv", ["job", "sft", str(file), "--pid-file", str(pid_file)])
    job.main()
    assert pid_file.read_text() == f"{os.getpid()}\n"
    assert became == [[sys.executable, "-P", "-m", "trivet.launcher.commands.sft", "@", str(tmp_path / "17.0.toml")]]
    assert "TRIVET_SLURM__PARTITION" not in os.environ
    assert os.environ["TRIVET_VENVS"] == "/venvs"
