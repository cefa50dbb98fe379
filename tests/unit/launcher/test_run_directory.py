from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trivet.checkpoints.commit import PARTS, begin_part, commit, committed_steps, finish_part
from trivet.checkpoints.run_record import read_run
from trivet.config.layout import RunLayout
from trivet.config.load import load_config
from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import RunIdentity
from trivet.errors import CheckpointError, ConfigError, ResumeError, RunDirectoryBusy
from trivet.launcher.run import check_resume
from trivet.launcher.run_directory import RunDirectory, wait_of_job, write_configs
from trivet.process.lock import FileLock
from trivet.secret import make_secret
from trivet.wire.versions import Step


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path / "outputs")


def leave_a_run(layout: RunLayout, *, committed: list[int]) -> None:
    """Write what a finished run leaves: events, weights and the given checkpoints."""
    with RunDirectory(layout) as directory:
        directory.begin(RunIdentity(id="first", attempt=1), resumed_from=None)
    layout.weights_step(3).mkdir(parents=True)
    layout.events.touch()
    layout.logs.mkdir()
    for step in committed:
        for name in PARTS:
            (begin_part(layout, Step(step), name) / "state").write_text(name)
            finish_part(layout, Step(step), name)
        commit(layout, Step(step))


def assert_refused(layout: RunLayout, match: str, **options: Any) -> None:
    """Check that a run with these options cannot start in the directory."""
    with RunDirectory(layout) as directory, pytest.raises(ConfigError, match=match):
        directory.choose_start(**{"resume_step": None, "does_clean": False, **options})


def test_a_second_run_is_told_who_holds_the_directory_until_that_has_ended(layout: RunLayout) -> None:
    with RunDirectory(layout), pytest.raises(RunDirectoryBusy, match=r"in use by the run with pid \d+, started 20") as error:
        RunDirectory(layout).__enter__()
    assert error.value.exit_code == 2
    with RunDirectory(layout):
        layout.lock.unlink()  # which lets nobody in
        with pytest.raises(RunDirectoryBusy):
            RunDirectory(layout).__enter__()


def test_a_job_that_was_started_again_waits_for_its_earlier_start_and_is_not_over_when_that_stays(layout: RunLayout) -> None:
    with RunDirectory(layout):
        for environ, timeout_s, exit_code in (({"SLURM_RESTART_COUNT": "1"}, 120.0, 75), ({"JOBSET_RESTARTS": "0"}, 0.3, 2)):
            wait = wait_of_job(environ)
            assert wait.timeout_s == timeout_s
            with pytest.raises(RunDirectoryBusy) as error:
                RunDirectory(layout, wait=replace(wait, timeout_s=0.0)).__enter__()
            assert error.value.exit_code == exit_code


def test_an_empty_directory_starts_a_new_run(layout: RunLayout) -> None:
    with RunDirectory(layout) as directory:
        assert directory.choose_start(resume_step=None, does_clean=False) is None
        run = directory.identify(is_resumed=False)
        directory.begin(run, resumed_from=None)
    assert run.attempt == 1
    record = read_run(layout)
    assert record is not None
    assert record.id == run.id


@pytest.mark.parametrize(
    ("committed", "match"),
    [
        ([2, 4], r"weights, checkpoints, events\.jsonl.*add --trainer\.ckpt\.resume-step -1 to go on from step 4, add --clean"),
        ([], r"weights, events\.jsonl of an earlier run or measurement; add --clean"),
    ],
)
def test_results_of_an_earlier_run_are_refused_with_what_to_do(layout: RunLayout, committed: list[int], match: str) -> None:
    leave_a_run(layout, committed=committed)
    assert_refused(layout, match)


def test_a_run_that_produced_nothing_does_not_stand_in_the_way(layout: RunLayout) -> None:
    with RunDirectory(layout) as directory:
        directory.begin(RunIdentity(), resumed_from=None)
        layout.logs.mkdir()
        assert directory.choose_start(resume_step=None, does_clean=False) is None


def test_a_resumed_run_keeps_its_id_and_counts_its_attempts(layout: RunLayout) -> None:
    leave_a_run(layout, committed=[2, 4])
    with RunDirectory(layout) as directory:
        assert directory.choose_start(resume_step=-1, does_clean=False) == 4
        assert directory.choose_start(resume_step=2, does_clean=False) == 2
        run = directory.identify(is_resumed=True)
        directory.begin(run, resumed_from=Step(2))
    assert run == RunIdentity(id="first", attempt=2)
    assert committed_steps(layout) == [2, 4]
    assert layout.weights_step(3).is_dir()


def test_a_new_run_gets_a_secret_of_its_own_and_a_resumed_one_keeps_it(layout: RunLayout) -> None:
    leave_a_run(layout, committed=[2])
    secret = make_secret(layout.secret)
    with RunDirectory(layout) as directory:
        directory.begin(RunIdentity(id="first", attempt=2), resumed_from=Step(2))
        assert make_secret(layout.secret).token == secret.token
        directory.renew_secret()
        assert not layout.secret.exists()


def test_a_new_run_keeps_the_secret_of_a_server_that_was_started_for_it(layout: RunLayout) -> None:
    secret = make_secret(layout.secret)
    with RunDirectory(layout) as directory:
        assert directory.choose_start(resume_step=None, does_clean=False) is None
        directory.renew_secret()
    assert make_secret(layout.secret).token == secret.token


def test_a_damaged_checkpoint_is_refused_and_newer_ones_stay(layout: RunLayout) -> None:
    leave_a_run(layout, committed=[2, 4])
    (layout.checkpoint_step(2) / "trainer" / "state").write_text("altered")
    with RunDirectory(layout) as directory, pytest.raises(ConfigError, match="state"):
        directory.begin(RunIdentity(id="first", attempt=2), resumed_from=Step(2))
    assert committed_steps(layout) == [2, 4]


def test_a_line_cut_short_by_a_crash_is_removed_before_the_roles_append(layout: RunLayout) -> None:
    leave_a_run(layout, committed=[2])
    layout.events.write_text('{"whole": 1}\n{"event": "tra')
    with RunDirectory(layout) as directory:
        directory.begin(RunIdentity(id="first", attempt=2), resumed_from=Step(2))
    assert layout.events.read_text() == '{"whole": 1}\n'


@pytest.mark.parametrize(
    ("options", "match"),
    [({"resume_step": 3}, "there are 2"), ({"resume_step": 2, "does_clean": True}, "one of the two")],
)
def test_a_resume_that_cannot_be_is_refused(layout: RunLayout, options: dict[str, Any], match: str) -> None:
    leave_a_run(layout, committed=[2])
    assert_refused(layout, match, **options)


def test_clean_removes_what_a_run_writes_and_nothing_else(layout: RunLayout) -> None:
    leave_a_run(layout, committed=[2])
    notes = layout.root / "notes.md"
    notes.write_text("mine")
    with RunDirectory(layout) as directory:
        assert directory.choose_start(resume_step=None, does_clean=True) is None
        run = directory.identify(is_resumed=False)
        assert layout.weights.is_dir()
        directory.begin(run, resumed_from=None)
    assert run.id != "first"
    assert sorted(path.name for path in layout.root.iterdir()) == [".lock", "notes.md", "run.json"]


@pytest.mark.parametrize("does_clean", [False, True])
@pytest.mark.parametrize(
    ("name", "match"), [("configs", "configs but no run"), ("thesis.tex", r"holds thesis\.tex .* choose a new one, e\.g\.")]
)
def test_a_directory_that_no_run_wrote_is_left_alone(layout: RunLayout, name: str, match: str, does_clean: bool) -> None:
    layout.root.mkdir()
    (layout.root / name).touch()
    assert_refused(layout, match, does_clean=does_clean)
    assert (layout.root / name).exists()


def test_what_was_measured_before_a_run_is_kept_until_it_is_to_be_removed(layout: RunLayout) -> None:
    """A server by itself and the command `eval` leave such files."""
    for directory in (layout.reports, layout.evals, layout.logs):
        directory.mkdir(parents=True)
    with RunDirectory(layout) as directory:
        with pytest.raises(ConfigError, match="holds evals of an earlier run or measurement; add --clean"):
            directory.choose_start(resume_step=None, does_clean=False)
        assert directory.choose_start(resume_step=None, does_clean=True) is None
        with FileLock(layout.role_lock("trainer"), what="trainer"), pytest.raises(ConfigError, match="left alone"):
            directory.choose_start(resume_step=None, does_clean=True)
        layout.weights.mkdir()
        with pytest.raises(ConfigError, match="left alone"):
            directory.choose_start(resume_step=None, does_clean=True)


def test_an_output_directory_that_is_a_file_is_refused(layout: RunLayout) -> None:
    layout.root.touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(layout).__enter__()


def test_a_written_configuration_starts_the_role_again_as_it_was(layout: RunLayout) -> None:
    config = InferenceConfig.model_validate({"run": {"id": "r", "attempt": 3}, "server": {"port": 40001}})
    path = layout.configs / "inference.toml"
    write_configs({path: config})
    assert load_config(InferenceConfig, ["@", str(path)], environ={}).config == config


def test_a_fork_is_a_new_run_that_starts_from_the_others_checkpoint(layout: RunLayout, tmp_path: Path) -> None:
    leave_a_run(layout, committed=[2, 4])
    fork = RunLayout(tmp_path / "fork")
    with RunDirectory(fork) as directory:
        step = directory.choose_start(resume_step=2, does_clean=False, resume_from=layout.root)
        run = directory.identify(is_resumed=False)
        directory.begin(run, resumed_from=step, resume_from=layout.root)
    assert (step, run.attempt) == (2, 1)
    assert run.id != "first"
    assert committed_steps(fork) == [2]
    assert committed_steps(layout) == [2, 4]


def test_a_fork_does_not_overwrite_a_run(layout: RunLayout, tmp_path: Path) -> None:
    other = RunLayout(tmp_path / "other")
    leave_a_run(other, committed=[2])
    leave_a_run(layout, committed=[4])
    assert_refused(layout, "of an earlier run", resume_from=other.root)


def test_a_dry_run_checks_that_the_checkpoint_to_resume_from_is_there_and_whole(layout: RunLayout) -> None:
    def config(step: int) -> RLConfig:
        return RLConfig.model_validate({"output_dir": str(layout.root), "trainer": {"ckpt": {"resume_step": step}}})

    leave_a_run(layout, committed=[1, 2])
    check_resume(config(2))
    with pytest.raises(ResumeError, match="there are 1, 2"):
        check_resume(config(3))
    (layout.checkpoint_step(2) / PARTS[0] / "state").write_text("altered")
    with pytest.raises(CheckpointError):
        check_resume(config(-1))
