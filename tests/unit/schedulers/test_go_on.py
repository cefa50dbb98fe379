"""Test what a further start of a job goes on with: the newest commit of its own run, or what an evaluation lacks."""

from pathlib import Path

import pytest

from trivet.checkpoints.run_record import write_run
from trivet.config.layout import COMMITTED, RunLayout
from trivet.config.load import load_config
from trivet.config.schema.evaluation import EvalConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.sft import SftConfig
from trivet.config.schema.shared import RunIdentity
from trivet.schedulers.job import Progress, decide, go_on, is_complete, read_progress, run

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
    write_run(RunLayout(tmp_path), RunIdentity(id="a", attempt=2))
    found = read_progress(RunLayout(tmp_path))
    assert (found.run, found.commit) == ("a attempt 2", 12)
    (tmp_path / "checkpoints" / "step_12" / COMMITTED).write_text('{"another": "run"}')
    assert read_progress(RunLayout(tmp_path)).digest != found.digest


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


@pytest.mark.parametrize(
    ("steps", "before", "now", "is_done"),
    [
        (["--max-steps", "4"], NOTHING, Progress(run="a", commit=4), True),
        (["--max-steps", "4"], NOTHING, Progress(run="a", commit=3), False),
        (["--max-steps", "4"], NOTHING, NOTHING, False),
        pytest.param(["--max-steps", "4"], *[Progress(run="a", commit=4)] * 2, False, id="a commit of another job"),
        pytest.param([], NOTHING, Progress(run="a", commit=4), False, id="a run without end"),
    ],
)
def test_a_run_is_complete_when_its_job_has_committed_the_last_step(
    steps: list[str], before: Progress, now: Progress, is_done: bool
) -> None:
    assert is_complete(rl_config(*steps), before=before, now=now) is is_done
    assert is_complete(load_config(SftConfig, steps).config, before=before, now=now) is is_done


def test_a_job_whose_run_is_complete_ends_with_0(tmp_path, monkeypatch, capsys):
    """A node that SLURM lost after the last commit has the job queued again. Without this the launcher would refuse to resume."""
    monkeypatch.setenv("JOB_RETRIED", "0")
    file, pid_file = tmp_path / "sft.toml", tmp_path / "17.pid"
    file.write_text(f'output_dir = "{tmp_path}"\nmax_steps = 4\n')
    assert decide("sft", file, pid_file=pid_file) == tmp_path / "17.toml"
    commit(tmp_path, 4)
    assert run("sft", file, pid_file=pid_file) == 0
    assert capsys.readouterr().err.count("the run is complete") == 1


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
