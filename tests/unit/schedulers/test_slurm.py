import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from trivet.config.loading.load import load_config
from trivet.config.sections.evaluation import EvalConfig
from trivet.config.sections.rl import RLConfig
from trivet.config.sections.sft import SftConfig
from trivet.config.sections.slurm import SlurmConfig
from trivet.errors import ConfigError, SubmissionFailed
from trivet.launcher.commands import rl
from trivet.schedulers.slurm import Job, count_gpus, make_script, run_sbatch, submit

RUN = """
output_dir = "{directory}"
max_steps = 3
[model]
name = "Qwen/Qwen3-0.6B"
[orchestrator]
rollouts_per_example = 4
[[orchestrator.env]]
id = "reverse-text"
[slurm]
partition = "gpu"
"""


def make_job(directory: Path, **keys: object) -> Job:
    config = SlurmConfig.model_validate(keys)
    return Job(command="rl", config=config, directory=directory, num_gpus=2, python="/venv/bin/python")


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def run_file(directory: Path, more: str = "") -> Path:
    file = directory / "run.toml"
    file.write_text(RUN.format(directory=directory / "run") + more)
    return file


def stand_in(directory: Path, text: str) -> str:
    """Return a program that plays sbatch."""
    program = directory / "sbatch"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def test_the_directives_are_those_of_the_table(tmp_path):
    keys = {
        "job_name": "my run",
        "time": "4:00:00",
        "exclusive": True,
        "sbatch_args": ["--mail-type=END"],
        "signal_seconds": 90,
    }
    found = directives(make_script(make_job(tmp_path, **keys)))
    assert found == [
        "--job-name='my run'",
        "--time=4:00:00",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--gres=gpu:2",
        "--exclusive",
        f"--output={tmp_path}/%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@90",
        "--mail-type=END",
    ]


@pytest.mark.parametrize(
    "keys", [{}, {"requeue": False}, {"pre_run_command": "module load cuda", "srun_args": ["--mpi=none", "a b"]}]
)
def test_a_script_is_clean_for_bash_and_shellcheck(tmp_path, keys):
    script = tmp_path / "rl.sbatch"
    script.write_text(make_script(make_job(tmp_path / "with spaces", **keys)))
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def test_names_in_a_path_are_no_part_of_the_script(tmp_path):
    script = tmp_path / "rl.sbatch"
    text = make_script(make_job(tmp_path / "it's $(touch here) 100%", project_dir=tmp_path))
    assert "--output='" in text
    assert "100%%'/%j.log" in text
    script.write_text(text.replace("srun ", "echo ").replace("squeue", "true"))
    subprocess.run(["bash", script], check=True, env=os.environ | {"SLURM_JOB_ID": "1"}, stdout=subprocess.DEVNULL)
    assert not (tmp_path / "here").exists()


def test_a_job_that_is_not_to_be_queued_again_asks_for_nothing(tmp_path):
    script = make_script(make_job(tmp_path, requeue=False))
    assert "--no-requeue" in directives(script)
    assert "scontrol" not in script


def test_a_value_of_two_lines_is_refused():
    with pytest.raises(ValueError, match="partition"):
        SlurmConfig(partition="gpu\n#SBATCH --account=other")


@pytest.mark.parametrize(
    ("kind", "flags", "count"),
    [
        (RLConfig, [], 2),
        (RLConfig, ["--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "2,3"], 4),
        (RLConfig, ["--inference-gpu-ids", "0", "--trainer-gpu-ids", "0"], 1),
        (RLConfig, ["--slurm.gpus-per-node", "0"], 0),
        (SftConfig, ["--num-ranks", "4"], 4),
        (SftConfig, ["--device", "cpu"], 0),
        (EvalConfig, ["--env.id", "reverse-text"], 0),
    ],
)
def test_a_job_asks_for_the_gpus_that_the_configuration_names(kind, flags, count):
    needed = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x"] if kind is RLConfig else []
    config = load_config(kind, [*needed, "--slurm.job-name", "x", *flags]).config
    assert count_gpus(config) == count


def test_a_dry_run_writes_script_and_configuration_and_submits_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(Path(stand_in(tmp_path, "exit 9")).parent) + os.pathsep + os.environ["PATH"])
    file = run_file(tmp_path)
    monkeypatch.setattr("sys.argv", ["rl", "@", str(file), "--dry-run"])
    assert rl.main() == 0
    directory = tmp_path / "run" / "slurm"
    assert f"sbatch {directory / 'rl.sbatch'}" in capsys.readouterr().out
    assert stat.S_IMODE((directory / "rl.toml").stat().st_mode) == 0o600
    submitted = load_config(RLConfig, ["@", str(directory / "rl.toml")]).config
    meant = load_config(RLConfig, ["@", str(file)]).config
    assert submitted == meant.model_copy(update={"slurm": None})


def test_a_configuration_with_the_table_is_submitted_and_nothing_runs_here(tmp_path, monkeypatch, capsys):
    program = stand_in(tmp_path, f'echo "$@" > {tmp_path}/asked; echo "17;cluster"')
    monkeypatch.setenv("PATH", str(Path(program).parent) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr("sys.argv", ["rl", "@", str(run_file(tmp_path))])
    assert rl.main() == 0
    assert "job 17 submitted" in capsys.readouterr().out
    assert (tmp_path / "asked").read_text().strip() == f"--parsable {tmp_path / 'run/slurm/rl.sbatch'}"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["slurm"]


def test_without_the_table_nothing_is_submitted():
    flags = ["--orchestrator.rollouts-per-example", "4", "--orchestrator.env.id", "x"]
    assert submit(load_config(RLConfig, flags), False, command="rl") is None


@pytest.mark.parametrize(
    ("program", "message"),
    [("missing", "no sbatch"), ("echo 'Invalid partition' >&2; exit 1", "Invalid partition"), ("sleep 60", "did not answer")],
)
def test_what_sbatch_does_not_take_is_one_clear_error(tmp_path, monkeypatch, program, message):
    monkeypatch.setattr("trivet.schedulers.slurm._SBATCH_TIMEOUT_S", 0.5)
    words = [str(tmp_path / "none")] if program == "missing" else [stand_in(tmp_path, program)]
    with pytest.raises(SubmissionFailed, match=message):
        run_sbatch(tmp_path / "rl.sbatch", program=words)


def test_a_signal_that_comes_too_late_for_a_commit_is_refused(tmp_path):
    loaded = load_config(RLConfig, ["@", str(run_file(tmp_path, "signal_seconds = 60\n"))])
    with pytest.raises(ConfigError, match=r"slurm.signal_seconds \(60\).*raise slurm.signal_seconds"):
        submit(loaded, True, command="rl")


def test_an_evaluation_needs_a_directory_for_its_script():
    loaded = load_config(EvalConfig, ["--env.id", "x", "--slurm.job-name", "x"])
    with pytest.raises(ConfigError, match="output_dir"):
        submit(loaded, True, command="eval")
